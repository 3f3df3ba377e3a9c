"""A start without gradient descent: the closed-form map from the draft's hidden states to the target's final ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.batch import Batch
from draftsmith.distill.draft import CutDraft
from draftsmith.distill.losses import acceptance
from draftsmith.distill.teacher import HiddenTeacher

JUDGES = 512  # held-out positions that choose the strength
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the mean squared feature


class Fit(NamedTuple):
    """The ridge strength that was chosen, acceptance on tokens not fitted with it and with the identity, and the tokens fitted."""

    strength: float
    acceptance: float
    before: float
    tokens: int


@torch.no_grad()
def ridge(draft: CutDraft, teacher: HiddenTeacher, batches: Iterable[Batch], held_out: Iterable[Batch]) -> Fit:
    """Set the draft's map to argmin ||X A' - Y||^2 + s ||A||^2 over the scored tokens of `batches`.

    X are its hidden states [N, H], Y the teacher's [N, H]. Only X'X and X'Y are kept, in float64, so the data may be any
    length; s is the strength with the best acceptance on `held_out`.
    """
    draft.eval()
    width = draft.map.weight.shape[0]
    device = draft.map.weight.device
    xx, xy = (torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(2))
    tokens = 0
    for batch in batches:
        x, y = (one.double() for one in _pair(draft, teacher, batch))
        xx += x.T @ x
        xy += x.T @ y
        tokens += len(x)
    if not tokens:
        raise ValueError("no scored token to fit the warm start on")
    pairs = [_pair(draft, teacher, batch) for batch in held_out]
    x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
    some = torch.linspace(0, len(x) - 1, min(len(x), JUDGES), device=device).long()
    x, wanted = x[some], teacher.head(y[some])
    before = _acceptance(draft, x, wanted, draft.map.weight)
    scale = xx.diagonal().mean()
    fits = []
    for strength in STRENGTHS:
        solved = torch.linalg.solve(xx + strength * scale * torch.eye(width, dtype=torch.float64, device=device), xy).T.to(
            draft.map.weight
        )
        fits.append((_acceptance(draft, x, wanted, solved), strength, solved))
    best, strength, solved = max(fits, key=lambda fit: fit[0])
    draft.map.weight.copy_(solved)
    return Fit(strength, best, before, tokens)


def _pair(draft: CutDraft, teacher: HiddenTeacher, batch: Batch) -> tuple[Tensor, Tensor]:
    return draft.features(*draft.inputs(batch)), teacher.hidden(batch)


def _acceptance(draft: CutDraft, x: Tensor, wanted: Tensor, weight: Tensor) -> float:
    return float(acceptance(draft.head(x @ weight.T), wanted).mean())
