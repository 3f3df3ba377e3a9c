"""The smallest objective that can be saved, for tests of what is done with checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from draftsmith.distill import Batch, Loss


class Small:
    """An objective whose weight is the number of the step."""

    def __init__(self) -> None:
        self.trainable: nn.Module = nn.Linear(1, 1)

    def loss(self, batch: Batch) -> Loss:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weight").write_text(str(next(self.trainable.parameters()).item()))
