"""Ratios of sums with their 95 % bootstrap interval: the unit is the prompt, and all sums of a resample are of the same prompts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

FEWEST = 3  # units that an interval takes


class Interval(NamedTuple):
    """A ratio and its 95 % bootstrap interval with the prompt as the unit; the ends are None from fewer than 3 prompts."""

    value: float
    low: float | None
    high: float | None


def interval(units: Iterable[tuple[float, ...]], resamples: int, seed: int = 0) -> Interval:
    """sum a / sum b of (a, b) a unit, or (sum a / sum b) / (sum c / sum d) of (a, b, c, d); percentiles of the resampled ratios."""
    columns = np.array(list(units), dtype=np.float64).T
    value = float(_ratio(columns.sum(-1)))
    if columns.shape[1] < FEWEST:
        return Interval(value, None, None)
    drawn = _ratio(columns @ _draws(columns.shape[1], resamples, seed))
    low, high = np.percentile(drawn[np.isfinite(drawn)], (2.5, 97.5))
    return Interval(value, float(low), float(high))


def _ratio(sums: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold nothing to divide by, and is left out
        first = sums[0] / sums[1]
        return first if len(sums) == 2 else first / (sums[2] / sums[3])


@lru_cache(maxsize=4)  # one report asks for many figures of the same prompts
def _draws(units: int, resamples: int, seed: int) -> Any:
    """How often each resample draws each unit: [units, resamples]."""
    counts = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples)
    return counts.T.astype(np.float64)
