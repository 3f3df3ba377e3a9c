"""A draft's head and the losses, a few scored positions at a time, forward and backward: logits never exist for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.head import Logits
from draftsmith.distill.losses import LOSSES
from draftsmith.distill.signal import Overlap, Signal


class Asked(NamedTuple):
    """What is wanted of a draft's logits: `weights` of losses, `chunk` positions at a time, both laws at `temperature`
    (the sum then counts temperature squared, so that gradients keep their size; Hinton et al. 1503.02531), and the `ids` that are all
    the draft can say (None: every id)."""

    weights: Mapping[str, float]
    chunk: int = 128
    temperature: float = 1.0
    ids: Tensor | None = None


def scored_loss(draft: Tensor, head: Logits, signal: Signal, asked: Asked, learned: Sequence[Tensor] = ()) -> Tensor:
    """The weighted sum of losses over the N positions of `signal`, from the draft's hidden states [N, H] and its `head`.

    Logits exist for `chunk` positions at a time, forward and backward: the gradient of a chunk is taken at once and kept as
    [chunk, H]. It reaches `draft` and the head's own parameters, `learned`.
    """
    return _Chunked.apply(draft, head, signal, asked, *learned)


@torch.no_grad()
def judged(draft: Tensor, head: Logits, signal: Signal, asked: Asked, most: int | None = None) -> Overlap:
    """Acceptance and argmax agreement under the whole laws, at all N positions or at `most` of them, evenly spaced."""
    if most is not None and len(draft) > most:
        some = torch.linspace(0, len(draft) - 1, most, device=draft.device).long()
        draft, signal = draft[some], signal.picked(some)
    starts = range(0, max(len(draft), 1), asked.chunk)  # no position at all still has a law, of no rows
    parts = [signal.overlap(head(draft[at]), at, asked.ids) for at in (slice(start, start + asked.chunk) for start in starts)]
    return Overlap(*map(torch.cat, zip(*parts, strict=True)))


def sums(each: Overlap) -> dict[str, Tensor]:
    """What the loop divides by `judged`: acceptance, the most it can be where only bounds are known, and agreement."""
    low, high, agrees = (one.float().sum() for one in each)
    return {"acceptance": low, "acceptance_at_most": high, "agreement": agrees, "judged": torch.tensor(float(len(each.low)))}


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, draft: Tensor, head: Logits, signal: Signal, asked: Asked, *learned: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[4:])
        total = torch.zeros((), dtype=torch.float32, device=draft.device)
        slopes, learned_slopes = [], [torch.zeros_like(one) for one in learned]
        for start in range(0, len(draft), asked.chunk):
            at = slice(start, start + asked.chunk)
            part = draft[at].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                ours, theirs = signal.against(head(part), at, asked.ids, asked.temperature)
                loss = torch.stack([weight * LOSSES[name](ours, theirs).sum() for name, weight in asked.weights.items()]).sum()
                loss = loss * asked.temperature**2
            if wanted:
                slope, *others = torch.autograd.grad(loss, [part, *learned])
                slopes.append(slope)
                for sum_, one in zip(learned_slopes, others, strict=True):
                    sum_ += one
            total += loss.detach()
        if wanted:
            ctx.save_for_backward(torch.cat(slopes) if slopes else torch.zeros_like(draft), *learned_slopes)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        draft, *learned = ctx.saved_tensors
        return (slope * draft, None, None, None, *(slope * one for one in learned))
