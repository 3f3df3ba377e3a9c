"""Rows to tensors, and the one shift by one: `scored[b, t]` says whether the prediction made AT t, of token t+1, counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """`ids`, `real` (not padding) and `scored`, each [B, T]; `scored` is aligned with logits, not with labels."""

    ids: Tensor
    real: Tensor
    scored: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(one.to(device) for one in self))


def collate(rows: list[tuple[list[int], int]], pad: int = 0) -> Batch:
    """Pad rows of (ids, prompt length) on the right; every token after the prompt is to be predicted, EOS included.

    Masks come from lengths, never from ids, so a pad id that equals EOS hides nothing. Padding on the right of a causal
    model is never attended to by a real token.
    """
    for number, (ids, prompt) in enumerate(rows):
        if not 1 <= prompt <= len(ids):
            raise ValueError(f"row {number}: a prompt of {prompt} in a row of {len(ids)} tokens; it needs 1..{len(ids)}")
    widest = max((len(ids) for ids, _ in rows), default=0)
    padded = torch.full((len(rows), widest), pad, dtype=torch.long)
    real = torch.zeros(len(rows), widest, dtype=torch.bool)
    scored = torch.zeros(len(rows), widest, dtype=torch.bool)
    for b, (row, prompt) in enumerate(rows):
        padded[b, : len(row)] = torch.tensor(row)
        real[b, : len(row)] = True
        scored[b, prompt - 1 : len(row) - 1] = True
    return Batch(padded, real, scored)
