"""Two candidates of two reports on the prompts that both answered: ratios of ratios, whose interval draws a prompt for both at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FEWEST = 3  # prompts that an interval takes
RESAMPLES = 2000

Lines = Sequence[Mapping[str, Any]]  # measurements, as json gave them back


class Paired(NamedTuple):
    """Theirs over ours: {value, low, high} of the speed-up and of tokens a call, None where it cannot be compared."""

    prompts: int
    speed_up: dict[str, float | None] | None
    tokens: dict[str, float | None]


def answers(lines: Lines) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Measurements of one candidate in one part, by prompt and turn."""
    return {(str(one["prompt"]), int(one.get("turn", 0))): one for one in lines}


def paired(ours: Lines, theirs: Lines, clocks: bool) -> Paired:
    """The second candidate over the first, on the answers that both gave. `clocks`: may seconds be compared?

    A speed-up is each one's own, against the plain decoding that ran beside it, so that a machine which was slower on one of two days
    is slower on both sides.
    """
    a, b = answers(ours), answers(theirs)
    both, unit = [key for key in a if key in b], units([a, b])
    sums: dict[str, np.ndarray] = {}
    for key in both:
        row = np.array([*_sums(b[key]), *_sums(a[key])])
        sums[unit[key[0]]] = sums.get(unit[key[0]], 0) + row
    table = np.array(list(sums.values()))
    # columns: new tokens, seconds, plain tokens, plain seconds, calls; theirs, then ours
    speed = ratio(table, (1, -1, -1, 1, 0, -1, 1, 1, -1, 0)) if clocks else None
    return Paired(len({prompt for prompt, _ in both}), speed, ratio(table, (1, 0, 0, 0, -1, -1, 0, 0, 0, 1)))


def units(reports: Sequence[Mapping[tuple[str, int], Mapping[str, Any]]]) -> dict[str, str]:
    """Each prompt's unit of an interval: prompts that were decoded together in either report share a clock, and are drawn together."""
    unit: dict[str, str] = {}
    for lines in reports:
        for (prompt, _), one in lines.items():
            first = str(one.get("group") or prompt)
            mine, together = unit.setdefault(prompt, prompt), unit.setdefault(first, first)
            if mine != together:
                unit |= {each: together for each, its in unit.items() if its == mine}
    return unit


def ratio(table: np.ndarray, powers: Sequence[int], resamples: int = RESAMPLES, seed: int = 0) -> dict[str, float | None]:
    """The product of the columns' sums, [units, columns], each to its power, with its 95 % bootstrap interval over the units."""
    used = np.array([place for place, power in enumerate(powers) if power])
    columns, exponents = table[:, used], np.array(powers)[used]
    value = float(np.exp(exponents @ np.log(columns.sum(0))))
    if len(table) < FEWEST:
        return {"value": value, "low": None, "high": None}
    drawn = np.random.default_rng(seed).multinomial(len(table), np.full(len(table), 1 / len(table)), size=resamples)
    low, high = np.percentile(np.exp(np.log(drawn @ columns) @ exponents), (2.5, 97.5))
    return {"value": value, "low": float(low), "high": float(high)}


def _sums(one: Mapping[str, Any]) -> tuple[float, ...]:
    return (one["new_tokens"], one["seconds"], one["baseline_tokens"], one["baseline_seconds"], len(one["accepted_lengths"]))
