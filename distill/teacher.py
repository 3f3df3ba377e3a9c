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


class Remembering:
    """A teacher that keeps what it said of `batches`, which are asked again and again: [N, H] each, on their device."""

    def __init__(self, teacher: Teacher, batches: list[Batch]) -> None:
        self.head = teacher.head
        self._teacher = teacher
        self._kept: dict[int, Tensor] = {}
        self._known = {id(batch.ids): batch for batch in batches}

    def hidden(self, batch: Batch) -> Tensor:
        key = id(batch.ids)
        if key not in self._known:
            return self._teacher.hidden(batch)
        if key not in self._kept:
            self._kept[key] = self._teacher.hidden(batch)
        return self._kept[key]
