"""Exits of the tiny targets: one of each kind of head, moved from where it begins so that it says something of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftsmith.specdec.drafters.exit_heads import ExitHead, ExitSettings, make_head

KINDS: dict[str, ExitSettings] = {
    "adapter": ExitSettings(1, "adapter", 8),
    "full": ExitSettings(2, "adapter", None),
    "block": ExitSettings(1, "block", 8),
    "lora": ExitSettings(2, "lora", 8, {"rank": 2, "alpha": 4, "targets": "all-linear"}),
}
LAST: dict[str, ExitSettings] = {  # what is the target itself, as it begins
    "adapter": ExitSettings(3, "adapter", 8),
    "full": ExitSettings(3, "adapter", None),
    "block": ExitSettings(2, "block", 8),
    "lora": ExitSettings(3, "lora", 8, {"rank": 2, "alpha": 4, "targets": "all-linear"}),
}


def moved(head: Any, sigma: float = 0.1, seed: int = 5) -> Any:
    """The head with noise on every weight of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in head.parameters():
            one.add_(torch.randn(one.shape, generator=generator) * sigma)
    return head


def some_head(target: Any, kind: str) -> tuple[int, ExitHead]:
    return KINDS[kind].layer, moved(make_head(target, KINDS[kind])).eval()


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every weight of a model, byte for byte."""
    return {name: one.detach().numpy().tobytes() for name, one in model.state_dict().items()}
