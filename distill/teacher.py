"""Who says what is right: the target itself here, or what was kept of it (train/stored/)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import Head, check_head, last_hidden
from draftsmith.distill.making.lora import adapted
from draftsmith.distill.signal import Dense, Signal
from draftsmith.specdec.models import blocks


class Teacher(Protocol):
    rows: int  # its laws are over ids 0..rows-1

    def signal(self, batch: Batch) -> Signal:
        """What it says at each scored position of the batch, in its order."""


class HiddenTeacher(Teacher, Protocol):
    """A teacher whose final hidden states are at hand, as a warm start in closed form needs them."""

    head: Head

    def hidden(self, batch: Batch) -> Tensor:
        """[N, H], a row for each scored position of the batch, in its order."""


class LiveTeacher:
    """The target itself, frozen, one forward a batch; the logits of prompt tokens are never made.

    `real` is how many ids it can say, where rows beyond only pad its head.
    """

    def __init__(self, target: PreTrainedModel, real: int | None = None) -> None:
        if adapted(target):
            raise ValueError(
                "the teacher carries adapters, and what is said through them would be taught as its own; load it again without them, "
                "or merge them (distill.making.lora.merged)"
            )
        self.target = target.eval().requires_grad_(False)
        self._listens = True
        self.head = Head(target, real)
        self.rows = self.head.rows
        check_head(target, self.head)

    def let_go(self) -> None:
        """Give back the memory of the target's blocks, where all that it will be asked was kept. Its embedding, norm and head stay, for the
        draft and the losses read them; another forward is refused."""
        for block in blocks(self.target)[1]:
            for one in block.parameters():
                if hasattr(one, "to_local"):  # of a target in parts, to whose memory torch holds on by another name
                    one.to_local().untyped_storage().resize_(0)
            block.to("meta")
        self._listens = False

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        if not self._listens:
            raise RuntimeError("the target was asked about rows that were not kept, after its blocks were let go of")
        batch = batch.to(self.target.device)
        return last_hidden(self.target, batch.ids, batch.documents)[batch.scored]

    def signal(self, batch: Batch) -> Dense:
        return Dense(self.hidden(batch), self.head)
