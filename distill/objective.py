"""What a training loop needs to know of a method: what is trained, a summed loss, and how the result is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from draftsmith.distill.batch import Batch
from draftsmith.distill.signal import Overlap


class Loss(NamedTuple):
    """SUMS: `total` over the `metrics["scored"]` tokens, acceptance and agreement over the `metrics["judged"]` ones among them.

    The loop divides, once, by the global counts. In eval mode `each` has every scored position of the batch, in its order, so that
    a block of them can be judged as a whole. An objective that teaches several drafts at once has `parts` in its place, by name; its
    total and sums are then means over them by their shares.
    """

    total: Tensor
    metrics: dict[str, Tensor]
    each: Overlap | None = None
    parts: Mapping[str, Overlap] | None = None


class Objective(Protocol):
    trainable: nn.Module

    def loss(self, batch: Batch) -> Loss: ...

    def save(self, folder: Path) -> None: ...


class Several(Protocol):
    """What an objective of several drafts has besides: the share of each by name (they add up to 1), and a place for their held-out
    figures, which whoever evaluates fills, so that they are saved beside them."""

    shares: Mapping[str, float]
    figures: Mapping[str, Mapping[str, float]]
