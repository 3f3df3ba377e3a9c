"""The teacher's signal: the target's final hidden states at scored positions, and the head that makes laws of them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import Head, check_head, last_hidden


class Teacher(Protocol):
    head: Head

    def hidden(self, batch: Batch) -> Tensor:
        """[N, H], a row for each scored position of the batch, in its order."""


class LiveTeacher:
    """The target itself, frozen, one forward a batch; the logits of prompt tokens are never made."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target.eval().requires_grad_(False)
        self.head = Head(target)
        check_head(target, self.head)

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Tensor:
        return last_hidden(self.target, batch.ids.to(self.target.device))[batch.scored.to(self.target.device)]
