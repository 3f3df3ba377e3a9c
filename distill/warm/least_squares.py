"""Ridge regression from sums alone: X'X and X'Y in float64 are all that a closed-form fit needs of its data, however long."""

from __future__ import annotations

import torch
from torch import Tensor


class Sums:
    """What was seen of `inputs` features and `outputs` wanted values; the order and the size of the parts do not matter."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        # Some accelerators know no float64; the sums are small, so they live where it is at hand.
        self._device = device if device.type in ("cpu", "cuda") else torch.device("cpu")
        self.xx = torch.zeros(inputs, inputs, dtype=torch.float64, device=self._device)
        self.xy = torch.zeros(inputs, outputs, dtype=torch.float64, device=self._device)
        self.tokens = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Features [n, inputs] and wanted values [n, outputs] of n more tokens."""
        x, y = x.to(self._device, torch.float64), y.to(self._device, torch.float64)
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.tokens += len(x)

    def check(self) -> None:
        """ValueError where no fit can be had of what was seen."""
        width = len(self.xx)
        if not self.tokens:
            raise ValueError("no scored token to fit the warm start on")
        if self.tokens < width:
            raise ValueError(
                f"{self.tokens} tokens cannot fit a map of {width} features; give the warm start {width} tokens or more, ten times that to do well"
            )
        if not (self.xx.isfinite().all() and self.xy.isfinite().all()):
            raise ValueError(
                "the hidden states that the warm start is fitted on are not all finite; is a half-precision model overflowing?"
            )
        if not self.xx.diagonal().any():
            raise ValueError("the draft's hidden states are all zero, so nothing can be fitted to them")

    def solve(self, strength: float, toward: Tensor | None = None) -> Tensor:
        """argmin sum ||x A' - y||^2 + strength * mean(diag X'X) * ||A - toward||^2: A [outputs, inputs], in float64."""
        ridge = strength * self.xx.diagonal().mean()
        wanted = self.xy if toward is None else self.xy + ridge * toward.to(self.xy).T
        return torch.cholesky_solve(wanted, torch.linalg.cholesky(self.xx + ridge * torch.eye(len(self.xx)).to(self.xx))).T
