"""From what a round costs to what to do: the best k, the batch above which speculation no longer pays, the acceptance that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from draftsmith.eval.plan.roofline import MOST, Costs, Pair, costs

Alpha = tuple[float, ...]  # conditional acceptance of each drafted position; the last one holds for all behind it
LARGEST = 1024  # batch


class Best(NamedTuple):
    """The k of the largest speed-up; below 1 it is still one of a block, not of plain decoding."""

    k: int
    speed_up: float


def tokens_per_call(alpha: Alpha, k: int) -> float:
    """1 + a1 + a1 a2 + ... over k drafted tokens, the target's own token included."""
    total = product = 1.0
    for place in range(k):
        product *= alpha[min(place, len(alpha) - 1)]
        total += product
    return total


def speed_up(costs: Costs, alpha: Alpha, k: int) -> float:
    """S = tau / (r(k + 1) + k c + o); 1 at k = 0, where no round is made."""
    if k == 0:
        return 1.0
    return tokens_per_call(alpha, k) / (costs.r(k) + k * costs.c + costs.o)


def best(costs: Costs, alpha: Alpha, ks: Sequence[int]) -> Best:
    """The best of `ks`; the shortest of equals."""
    return max((Best(k, speed_up(costs, alpha, k)) for k in ks), key=lambda one: (one.speed_up, -one.k))


def needed(costs: Costs, goal: float, ks: Sequence[int]) -> float | None:
    """The acceptance, the same at every position, from which the best of `ks` reaches `goal`; None where even 1 does not."""
    if best(costs, (1.0,), ks).speed_up < goal:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if best(costs, (middle,), ks).speed_up >= goal else (middle, high)
    return high


def pays(pair: Pair, alpha: Alpha, context: int, ks: Sequence[int], at: int = 1) -> list[tuple[int, int]]:
    """The batches from 1 to LARGEST, or `at`, with a speed-up above 1, as ranges that hold both their ends; `at` is looked at for certain.
    With experts there may be two."""

    def gains(batch: int) -> bool:
        return best(costs(pair, batch, context, max(ks)), alpha, ks).speed_up > 1

    largest = max(LARGEST, at)
    grid = sorted({1, 2, 3, at, largest, *(round(2 ** (step / 2)) for step in range(4, 40) if 2 ** (step / 2) < largest)})
    known = {batch: gains(batch) for batch in grid}
    ranges: list[tuple[int, int]] = []
    start = 1
    for low, high in pairwise(grid):
        before = known[low]
        if before == known[high]:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if gains(middle) == before else (low, middle)
        if before:
            ranges.append((start, low))
        start = high
    return [*ranges, (start, largest)] if known[largest] else ranges


def ks_of(k: int | None) -> range:
    """One k where it is asked for, else all."""
    return range(1, MOST + 1) if k is None else range(k, k + 1)
