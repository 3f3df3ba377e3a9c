"""Does the model of a round account for what was measured? Costs come from the clocks, acceptance from the answers themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq

from draftsmith.eval.measurement import Measurement
from draftsmith.eval.prediction.costs import Cost
from draftsmith.eval.prediction.forced import Forced


def explained(measured: Sequence[Measurement], cost: Cost, k: int, drafts_all: bool) -> dict[str, Any] | None:
    """S = tau / (k c + r + o) with the measured tau, and what it makes of whole answers; None where no round came behind a prefill.

    `drafts_all`: it drafts as many tokens as it is asked for, so a round's drafting goes by their number; a lookup looks but once.
    """
    fed = [drafted + 1 for m in measured for drafted in m.drafted_lengths[1:]]
    if not fed:
        return None
    tau = (sum(m.new_tokens for m in measured) - len(measured)) / len(fed)
    r, drafted = cost.r, float(k)
    if max(m.rows for m in measured) == 1:  # rows of a batch are fed what the widest of them needs
        if cost.widths:
            widths, steps = zip(*cost.widths, strict=True)
            r = float(np.interp(fed, widths, steps).mean())
        if drafts_all:
            drafted = float(np.mean(fed)) - 1
    decoding = tau / (drafted * cost.c + r + cost.o)
    return {
        "speed_up": whole(measured, decoding, cost), "decoding": decoding, "tau": tau, "c": cost.c, "r": r, "o": cost.o,
        "prefill": cost.prefill, "r_by_tokens": [list(one) for one in cost.widths], "drafted": drafted,
        "break_even_alpha": break_even(k, drafted * cost.c + r + cost.o),
    }  # fmt: skip


def whole(measured: Sequence[Measurement], decoding: float, cost: Cost) -> float:
    """A speed-up of the rounds, as one of whole answers: plain decoding's prefill has its share, and a draft that reads too adds to it."""
    read = sum(m.baseline_prefill_seconds for m in measured) / sum(m.baseline_seconds for m in measured)
    return 1 / (read * cost.prefill + (1 - read) / decoding)


def break_even(k: int, round_cost: float) -> float | None:
    """The acceptance, the same at every position, at which a round of `k` drafts yields as many tokens as the plain steps that it
    costs; None where all drafts accepted would not do."""
    if round_cost > k + 1:
        return None
    if round_cost <= 1:
        return 0.0
    return float(brentq(lambda a: sum(a**i for i in range(k + 1)) - round_cost, 0.0, 1.0))


def foretold(
    rows: Sequence[tuple[str, Forced]], measured: Sequence[Measurement], k: int | str, cost: Cost | None, of: str
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Teacher-forced figures of one arm from (unit, Forced) of each answer, and the sums of each unit that alpha's interval rests on."""
    units: dict[str, tuple[float, float]] = {}
    for unit, one in rows:
        had = units.get(unit, (0.0, 0.0))
        units[unit] = had[0] + one.overlap, had[1] + one.positions
    positions = sum(had for _, had in units.values())
    said: dict[str, Any] = {"of": of, "alpha": sum(had for had, _ in units.values()) / positions if positions else None}
    each = [(one.positions, one.rounds[k]) for _, one in rows if isinstance(k, int) and k in one.rounds]
    calls = sum(rounds.calls for _, rounds in each)
    tau = sum(behind for behind, _ in each) / calls if calls else None
    said |= {"block_length": tau, "by_position": None, "speed_up": None}
    if tau is not None:
        tried, kept = (np.sum([getattr(one, name) for _, one in each], axis=0) for name in ("tried", "accepted"))
        said["by_position"] = [float(a / t) if t > 0 else None for a, t in zip(kept, tried, strict=True)]
        if cost is not None:
            said["speed_up"] = whole(measured, tau / (int(k) * cost.c + cost.r + cost.o), cost)
    return said, units
