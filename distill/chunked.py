"""A draft's head and the losses, a few scored positions at a time, forward and backward: logits never exist for a whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.head import Logits
from draftsmith.distill.losses import OF_DATA, OF_TOKENS, loss_named
from draftsmith.distill.signal import Overlap, Signal, with_never

WHOLE = 64  # positions judged at a time: a chunk may be chosen for a support, and these laws are a vocabulary wide


class Asked(NamedTuple):
    """What is wanted of a draft's logits: `weights` of losses by name, `chunk` positions at a time, both laws at `temperature`
    (the sum then counts temperature squared, so that gradients keep their size; Hinton et al. 1503.02531), and the `ids` that are all
    the draft can say (None: every id)."""

    weights: Mapping[str, float]
    chunk: int = 128
    temperature: float = 1.0
    ids: Tensor | None = None


def scored_loss(
    draft: Tensor, head: Logits, signal: Signal, asked: Asked, learned: Sequence[Tensor] = (), said: Tensor | None = None
) -> Tensor:
    """The weighted sum of losses over the N positions of `signal`, from the draft's hidden states [N, H] and its `head`.

    Logits exist for `chunk` positions at a time, forward and backward: the gradient of a chunk is taken at once and kept as
    [chunk, H]. It reaches `draft` and the head's own parameters, `learned`. `said` [N] says which of the head's logits is that of the
    token which the data holds behind each position (`columns`); losses of the data's own token need it.
    """
    if said is None and any(_kind(name) in OF_DATA for name in asked.weights):
        raise ValueError(f"{', '.join(sorted(OF_DATA))} is a loss of the data's own tokens; hand them over as `said`")
    return _Chunked.apply(draft, head, signal, asked, said, *learned)


def columns(tokens: Tensor, ids: Tensor | None) -> Tensor:
    """Where each of `tokens` [N] stands among the sorted `ids` that a head's logits are over, len(ids) where it does not: [N]."""
    if ids is None:
        return tokens
    ids = ids.to(tokens.device)
    place = torch.searchsorted(ids, tokens)
    return torch.where(ids[place.clamp(max=len(ids) - 1)] == tokens, place, len(ids))


@torch.no_grad()
def judged(draft: Tensor, head: Logits, signal: Signal, asked: Asked, most: int | None = None) -> Overlap:
    """Acceptance and argmax agreement under the whole laws, at all N positions or at `most` of them, evenly spaced."""
    if most is not None and len(draft) > most:
        some = torch.linspace(0, len(draft) - 1, most, device=draft.device).long()
        draft, signal = draft[some], signal.picked(some)
    chunk = min(asked.chunk, WHOLE)
    starts = range(0, max(len(draft), 1), chunk)  # no position at all still has a law, of no rows
    parts = [signal.overlap(head(draft[at]), at, asked.ids) for at in (slice(start, start + chunk) for start in starts)]
    return Overlap(*map(torch.cat, zip(*parts, strict=True)))


def sums(each: Overlap) -> dict[str, Tensor]:
    """What the loop divides by `judged`: acceptance, the most it can be where only bounds are known, and agreement."""
    low, high, agrees = (one.float().sum() for one in each)
    return {"acceptance": low, "acceptance_at_most": high, "agreement": agrees, "judged": torch.tensor(float(len(each.low)))}


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, head: Logits, signal: Signal, asked: Asked, said: Tensor | None, *learned: Tensor
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=draft.device)
        slopes = torch.empty_like(draft) if wanted else draft
        # In float32 whatever the weights are: a sum over many chunks in bfloat16 loses the later ones.
        sums = [torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32)) for one in learned if wanted]
        for start in range(0, len(draft), asked.chunk):
            at = slice(start, start + asked.chunk)
            loss, *found = _chunk(draft[at], head, signal, at, asked, said, learned, wanted)
            total += loss
            if wanted:
                slopes[at] = found[0]
                for sum_, one in zip(sums, found[1:], strict=True):
                    sum_ += one
        if wanted:
            ctx.save_for_backward(slopes, *(sum_.to(one.dtype) for sum_, one in zip(sums, learned, strict=True)))
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        draft, *learned = ctx.saved_tensors
        return (slope * draft, None, None, None, None, *(slope * one for one in learned))


def _chunk(
    draft: Tensor,
    head: Logits,
    signal: Signal,
    at: slice,
    asked: Asked,
    said: Tensor | None,
    learned: Sequence[Tensor],
    wanted: bool,
) -> tuple[Tensor, ...]:
    """The loss of a few positions and, where `wanted`, its slopes in their hidden states and in `learned`.

    A function of its own, so that all that is a vocabulary wide is gone when the next chunk begins.
    """
    part = draft.detach().requires_grad_(wanted)
    with torch.set_grad_enabled(wanted):
        loss = _weighed(head(part), signal, at, asked, None if said is None else said[at])
    return (loss.detach(), *(torch.autograd.grad(loss, [part, *learned]) if wanted else ()))


def _weighed(logits: Tensor, signal: Signal, at: slice, asked: Asked, said: Tensor | None) -> Tensor:
    ours, theirs = signal.against(logits, at, asked.ids, asked.temperature)
    # Outcomes that are not just the draft's ids end with one that stands for all other ids.
    rest = int(ours.shape[-1] != logits.shape[-1])
    losses = []
    for name, weight in asked.weights.items():
        loss = loss_named(name)
        if _kind(name) in OF_DATA and said is not None:
            each = loss(with_never(logits / asked.temperature), _sure(said, logits.shape[-1] + 1))
        elif _kind(name) in OF_TOKENS:
            each = loss(ours, theirs, rest=rest)
        else:
            each = loss(ours, theirs)
        losses.append(weight * each.sum())
    return asked.temperature**2 * torch.stack(losses).sum()


def _sure(said: Tensor, outcomes: int) -> Tensor:
    """The laws that are sure of one outcome each: [n] -> [n, outcomes], in logs."""
    return torch.full((len(said), outcomes), -torch.inf, device=said.device).scatter_(1, said[:, None], 0.0)


def _kind(name: str) -> str:
    return name.partition(":")[0]
