"""What lies in memory while a pair decodes: both models, both caches, what is in work, and the system's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from draftsmith.eval.plan.roofline import Pair

PREFILL = 2048  # tokens of a prompt that an engine reads at once
LARGEST = 1 << 24  # tokens or sequences; a search ends there


class Room(NamedTuple):
    """Bytes; `has` is the device's memory."""

    system: float
    target: float
    draft: float
    target_cache: float
    draft_cache: float
    work: float
    has: float

    @property
    def total(self) -> float:
        return sum(self[:-1])

    @property
    def fits(self) -> bool:
        return self.total <= self.has


def serving(pair: Pair, batch: int, context: int, k: int) -> Room:
    """`batch` sequences of `context` tokens, k drafted at a time."""
    size, draft = pair.target, pair.draft
    own_cache = 0.0 if draft.size is None else batch * draft.size.cache(context + k) * pair.draft_dtype.cached
    # Laws of both, in fp32, at every position of a round; and a few activations of a part of a prompt, of one layer.
    laws = batch * (2 * k + 1) * size.vocabulary * 4.0
    stream = PREFILL * max(sum(one.kept) for one in size.blocks) * pair.dtype.cached
    return Room(
        pair.device.system_gb * 1e9, pair.dtype.bytes(size.parameters - size.layers, size.layers), pair.draft_dtype.bytes(*draft.own),
        batch * size.cache(context + k + 1) * pair.dtype.cached, own_cache, laws + stream, pair.device.memory_gb * 1e9,
    )  # fmt: skip


def most_batch(pair: Pair, context: int, k: int) -> int:
    """The most sequences of `context` tokens that fit; 0 where not even one does."""
    return _most(lambda batch: serving(pair, batch, context, k).fits)


def most_context(pair: Pair, batch: int, k: int) -> int:
    """The longest context at which `batch` sequences fit, bounded by the target's positions; 0 where none does."""
    found = _most(lambda context: serving(pair, batch, context, k).fits)
    return found if pair.target.positions is None else min(found, pair.target.positions)


def _most(fits: Callable[[int], bool]) -> int:
    low, high = 0, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
