"""A draft that skips layers of its target: each block before a gap is refitted, in closed form, to say what the skipped layers would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import last_hidden
from draftsmith.distill.making.drafts import CutDraft
from draftsmith.distill.warm.least_squares import Sums
from draftsmith.specdec.models import blocks

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the mean squared feature
PROJECTIONS = ("down_proj", "c_proj")  # what an MLP ends with, by family


class Bridge(NamedTuple):
    """Block `block` of the draft now predicts what the target's layer `to` reads, with held-out errors relative to its size."""

    block: int
    to: int
    strength: float | None
    before: float
    after: float


class Refit(NamedTuple):
    """At N real positions: what the block's last projection reads [N, I], what the block says and what it should say [N, H]."""

    inner: Tensor
    said: Tensor
    wanted: Tensor


def cannot_bridge(draft: CutDraft) -> str | None:
    """Why the blocks of this draft cannot be refitted, or None where they can."""
    block = _stack(draft)[0]
    projection = _projection(block)
    draft.eval()  # dropout would differ from one forward to the next
    if projection is None:
        return f"{type(block).__name__} ends its MLP with none of {', '.join(PROJECTIONS)}"
    embedding: Any = draft.target.get_input_embeddings()
    embedded = embedding(torch.tensor([[0, 1, 2]], device=draft.target.device))
    seen: list[Tensor] = []
    once, twice = (_watched(draft, embedded, block, projection, scale, seen) for scale in (1.0, 2.0))
    if not torch.allclose((twice - once).float(), seen[0].float(), atol=1e-3, rtol=1e-2):
        return f"{type(block).__name__} does more than add what its MLP says to the stream (a norm after it, say)"
    return None


@torch.no_grad()
def bridge(draft: CutDraft, batches: Sequence[Batch], held_out: Sequence[Batch]) -> list[Bridge]:
    """Refit the last projection of each block but the last, from the first gap on, so that a kept layer reads what it is used to.

    With r what a block says without its MLP, and a what its last projection D reads, D becomes the ridge solution of
    r + D a = h, h the target's stream where the next kept layer reads it; the ridge pulls D to what it was, and its strength is
    chosen on `held_out`. Every real token counts, prompts too, divided by the size of h, which varies a hundredfold.
    Nothing is added to the draft. The last block is left alone: what it says goes through the map. Takes the target's forward over each batch once, and
    keeps 4 bytes a real token, feature and gap.
    """
    stack = _stack(draft)
    gaps = [(at, draft.layers[at + 1]) for at in range(len(stack) - 1)]
    while gaps and draft.layers[gaps[0][0]] + 1 == gaps[0][1] and draft.layers[0] == 0:
        gaps.pop(0)
    if not gaps:
        return []
    if (why := cannot_bridge(draft)) is not None:
        raise ValueError(f"this draft cannot be bridged: {why}; give it layers without gaps from 0, or no bridge")
    streams = [[_streams(draft, one, [to for _, to in gaps]) for one in some] for some in (batches, held_out)]
    done = []
    for number, (at, to) in enumerate(gaps):
        projection = _projection(stack[at])
        assert projection is not None
        sums: Sums | None = None
        for batch, wanted in zip(batches, streams[0], strict=True):
            seen = _seen(draft, batch, stack[at], projection, wanted[number])
            size = _size(seen.wanted)
            sums = sums or Sums(seen.inner.shape[1], seen.wanted.shape[1], seen.inner.device)
            sums.add(seen.inner / size, (seen.wanted - seen.said) / size)
        if sums is None:
            raise ValueError("no batch to fit the bridge on")
        sums.check()
        held = [
            _seen(draft, batch, stack[at], projection, wanted[number]) for batch, wanted in zip(held_out, streams[1], strict=True)
        ]
        before = _error(held, None)
        found = [
            (_error(held, change), strength, change) for strength in STRENGTHS for change in [sums.solve(strength).to(held[0].said)]
        ]
        after, strength, change = min(found, key=lambda one: one[0])
        if after >= before:
            done.append(Bridge(at, to, None, before, before))
            continue
        projection.weight += change if isinstance(projection, nn.Linear) else change.T  # GPT-2's is stored turned
        done.append(Bridge(at, to, strength, before, after))
    return done


def _stack(draft: CutDraft) -> Any:
    return getattr(draft.body, blocks(draft.target)[0])


def _projection(block: nn.Module) -> Any:
    return next((getattr(block.mlp, name) for name in PROJECTIONS if hasattr(getattr(block, "mlp", None), name)), None)


def _streams(draft: CutDraft, batch: Batch, layers: list[int]) -> list[Tensor]:
    """What each of the target's `layers` reads at the real positions: [N, H] each."""
    _, stack = blocks(draft.target)
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _module, _inputs, output: found.__setitem__(layer, _first(output)[batch.real])

    handles = [stack[layer - 1].register_forward_hook(keep(layer)) for layer in layers]
    try:
        last_hidden(draft.target, batch.ids)
    finally:
        for handle in handles:
            handle.remove()
    return [found[layer] for layer in layers]


def _seen(draft: CutDraft, batch: Batch, block: nn.Module, projection: nn.Module, wanted: Tensor) -> Refit:
    found: dict[str, Tensor] = {}
    handles = [
        projection.register_forward_hook(lambda _module, inputs, _output: found.__setitem__("inner", inputs[0][batch.real])),
        block.register_forward_hook(lambda _module, _inputs, output: found.__setitem__("said", _first(output)[batch.real])),
    ]
    try:
        draft.features(*draft.inputs(batch))
    finally:
        for handle in handles:
            handle.remove()
    return Refit(found["inner"], found["said"], wanted)


def _watched(
    draft: CutDraft, embedded: Tensor, block: nn.Module, projection: nn.Module, scale: float, seen: list[Tensor]
) -> Tensor:
    """What the block says where its last projection says `scale` times what it does, which is kept in `seen`."""
    out: list[Tensor] = []

    def scaled(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        seen.append(output)
        return output * scale

    handles = [
        projection.register_forward_hook(scaled),
        block.register_forward_hook(lambda _module, _inputs, output: out.append(_first(output))),
    ]
    try:
        with torch.no_grad():
            draft.body(inputs_embeds=embedded, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return out[0]


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _size(wanted: Tensor) -> Tensor:
    """The root mean square of each position's stream: [N, 1]."""
    return wanted.float().pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-6)


def _error(held: list[Refit], change: Tensor | None) -> float:
    """The mean over tokens of ||said - wanted||^2 / ||wanted||^2."""
    total, tokens = 0.0, 0
    for inner, said, wanted in held:
        left = (said if change is None else said + inner @ change.T) - wanted
        total += float((left.float() / _size(wanted)).pow(2).mean(-1).sum())
        tokens += len(left)
    return total / max(1, tokens)
