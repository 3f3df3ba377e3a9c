"""Does the model of a round account for what was measured? Each half of the prompts is predicted with the costs of the other half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from draftsmith.eval.measurement import Measurement
from draftsmith.eval.prediction.costs import Cost
from draftsmith.eval.prediction.forced import Forced


class Tally(NamedTuple):
    """Sums over answers of one arm: rounds behind the prefills and all tokens, ours and plain decoding's; seconds of ours and of its."""

    rounds: int
    tokens: int
    behind: int  # tokens behind the prefills' own
    plain_rounds: int
    plain_tokens: int
    plain_behind: int
    asked: float  # drafts that were paid for
    draft: float
    target: float
    rest: float
    prefill: float
    plain_prefill: float
    plain: float  # its rounds

    @property
    def tau(self) -> float:
        """Tokens a round, over plain decoding's a step: 1, unless rows of a batch end at different times."""
        return self.behind / self.rounds * self.plain_rounds / self.plain_behind

    @property
    def cost(self) -> Cost:
        rounds, step = self.rounds, self.plain / self.plain_rounds
        c = self.draft / self.asked / step if self.asked else 0.0
        return Cost(c, self.target / rounds / step, self.rest / rounds / step, self.prefill / self.plain_prefill)


def tally(measured: Sequence[Measurement], k: int, drafts_all: bool) -> Tally:
    """`drafts_all`: it drafts as many tokens as it is asked for, and takes so much longer; a lookup looks but once, whatever it finds."""
    rounds = plain_rounds = asked = 0
    for rows in _batches(measured):  # a batch goes on until its last row ends
        here = max(len(m.drafted_lengths) for m in rows) - 1
        rounds += here
        plain_rounds += max(m.baseline_tokens for m in rows) - 1
        asked += sum(rows[0].drafted_lengths) if drafts_all and len(rows) == 1 else k * here
    draft, target, prefill, plain_prefill = (
        sum(getattr(m, what) for m in measured)
        for what in ("draft_seconds", "target_seconds", "prefill_seconds", "baseline_prefill_seconds")
    )
    tokens, plain_tokens = sum(m.new_tokens for m in measured), sum(m.baseline_tokens for m in measured)
    return Tally(
        rounds, tokens, tokens - len(measured), plain_rounds, plain_tokens, plain_tokens - len(measured), asked, draft, target,
        sum(m.seconds for m in measured) - prefill - draft - target, prefill, plain_prefill,
        sum(m.baseline_seconds for m in measured) - plain_prefill,
    )  # fmt: skip


def _batches(measured: Sequence[Measurement]) -> list[list[Measurement]]:
    """The rows that were decoded together."""
    together: dict[tuple[str, int], list[Measurement]] = {}
    for m in measured:
        together.setdefault((m.unit, m.turn), []).append(m)
    return list(together.values())


def explained(measured: Sequence[Measurement], k: int, drafts_all: bool) -> dict[str, Any] | None:
    """S = tau / (k c + r + o), and whole answers with the prefill: rounds and plain decoding's clock are of each half of the prompts
    itself, c, r, o and the prefill's factor of the other half, so that no clock predicts itself. None where a half has no rounds."""
    place = {unit: number for number, unit in enumerate(dict.fromkeys(m.unit for m in measured))}
    halves = [tally([m for m in measured if place[m.unit] % 2 == half], k, drafts_all) for half in (0, 1)]
    if not all(one.rounds and one.plain_rounds for one in halves):
        return None
    seconds = sum(
        this.plain_prefill * other.cost.prefill
        + this.rounds * this.plain / this.plain_rounds * taken(other.cost, this.asked / this.rounds)
        for this, other in (halves, halves[::-1])
    )
    both = tally(measured, k, drafts_all)
    cost, drafted = both.cost, both.asked / both.rounds
    plain = both.plain_tokens / (both.plain_prefill + both.plain)
    lengths = Counter(n for m in measured for n in m.drafted_lengths[1:])
    return {
        "speed_up": both.tokens / seconds / plain, "decoding": both.tau / taken(cost, drafted), "tau": both.tau, "drafted": drafted,
        "c": cost.c, "r": cost.r, "o": cost.o, "prefill": cost.prefill, "break_even_alpha": break_even(lengths, taken(cost, drafted)),
    }  # fmt: skip


def forecast(measured: Sequence[Measurement], k: int, drafts_all: bool, clocked: Cost) -> float | None:
    """The speed-up of whole answers by costs that were clocked on a few rounds before any of them, each call at r of the tokens it was fed. Of
    these answers it knows how many rounds and drafts there were, and how long plain decoding read their prompts beside writing them."""
    both = tally(measured, k, drafts_all)
    if not (both.rounds and both.plain_rounds and clocked.widths):
        return None
    drafted = [zip_longest(*(m.drafted_lengths[1:] for m in rows), fillvalue=0) for rows in _batches(measured)]
    widths = [1 + max(round_) for rounds in drafted for round_ in rounds]
    fed, r = zip(*clocked.widths, strict=True)
    speed = both.tau / taken(clocked._replace(r=float(np.interp(widths, fed, r).mean())), both.asked / both.rounds)
    return (both.plain_prefill + both.plain) / (both.plain_prefill * clocked.prefill + both.plain / speed)


def taken(cost: Cost, drafted: float) -> float:
    """A round in plain steps."""
    return drafted * cost.c + cost.r + cost.o


def break_even(lengths: Mapping[int, int], round_cost: float) -> float | None:
    """The acceptance, the same at every position, at which rounds yield as many tokens as the plain steps that they cost, so many of
    each number of drafts; None where all drafts accepted would not do. A lookup that seldom finds a draft needs more than its k says."""
    rounds = sum(lengths.values())
    # Of a reach of i drafts there are as many rounds as had i or more.
    reach = [sum(count for n, count in lengths.items() if n >= i) / rounds for i in range(max(lengths) + 1)]
    if round_cost > sum(reach):
        return None
    if round_cost <= 1:
        return 0.0
    return float(brentq(lambda a: sum(share * a**i for i, share in enumerate(reach)) - round_cost, 0.0, 1.0))


def foretold(rows: Sequence[tuple[str, Forced]], k: int | str, of: str) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Teacher-forced figures of one arm from (unit, Forced) of each answer, and the sums of each unit that alpha's interval rests on."""
    units: dict[str, tuple[float, float]] = {}
    for unit, one in rows:
        had = units.get(unit, (0.0, 0.0))
        units[unit] = had[0] + one.overlap, had[1] + one.positions
    positions = sum(had for _, had in units.values())
    said: dict[str, Any] = {"of": of, "alpha": sum(had for had, _ in units.values()) / positions if positions else None}
    each = [(one.positions, one.rounds[k]) for _, one in rows if isinstance(k, int) and k in one.rounds]
    calls = sum(rounds.calls for _, rounds in each)
    said |= {"block_length": sum(behind for behind, _ in each) / calls if calls else None, "by_position": None}
    if calls:
        tried, kept = (np.sum([getattr(one, name) for _, one in each], axis=0) for name in ("tried", "accepted"))
        said["by_position"] = [float(a / t) if t > 0 else None for a, t in zip(kept, tried, strict=True)]
    return said, units


def with_block(measured: Sequence[Measurement], k: int, drafts_all: bool, block_length: float) -> float | None:
    """The speed-up of whole answers if rounds brought so many tokens each, at the costs that were measured."""
    both = tally(measured, k, drafts_all)
    if not (both.rounds and both.plain_rounds):
        return None
    speed = block_length / taken(both.cost, both.asked / both.rounds)
    return (both.plain_prefill + both.plain) / (both.plain_prefill * both.cost.prefill + both.plain / speed)
