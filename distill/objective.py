"""What a training loop needs to know of a method: what is trained, a summed loss, and how the result is saved."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from draftsmith.distill.batch import Batch
from draftsmith.distill.signal import Overlap


class Loss(NamedTuple):
    """SUMS: `total` over the `metrics["scored"]` tokens, acceptance and agreement over the `metrics["judged"]` ones among them.

    The loop divides, once, by the global counts. In eval mode `each` has every scored position of the batch, in its order, so that
    a block of them can be judged as a whole.
    """

    total: Tensor
    metrics: dict[str, Tensor]
    each: Overlap | None = None


class Objective(Protocol):
    trainable: nn.Module

    def loss(self, batch: Batch) -> Loss: ...

    def save(self, folder: Path) -> None: ...
