"""One map in the making: a ridge from sums, steps on the KL after it, and held-out tokens that choose and judge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.chunked import Asked, judged
from draftsmith.distill.head import Head, Logits
from draftsmith.distill.least_squares import STRENGTHS, Sums
from draftsmith.distill.sharpen import expected, rows_of, sharpened
from draftsmith.distill.signal import Dense

JUDGES = 512  # held-out positions that choose, and as many others that say what was chosen is worth
CHUNK = 256  # positions whose logits exist at one time


class Fit(NamedTuple):
    """What was fitted and what it is worth on held-out tokens that neither fitted nor chose it, beside what was there before.

    `strength` is the ridge that was chosen, None where nothing fitted was better; `steps` are those taken on the KL after it.
    """

    strength: float | None
    steps: int
    acceptance: float
    before: float
    agreement: float
    agreement_before: float
    tokens: int
    seconds: float


class Wanted(NamedTuple):
    """What steps on the KL need of the target: the row of its head that it expects at each position [n, H], and the sum of its laws [S]."""

    rows: Tensor
    mass: Tensor


class Fitting:
    """Sums for the ridge as tokens come and, where steps follow, the states themselves: 4 bytes a feature, twice, a token."""

    def __init__(self, head: Head, steps: int = 0, support: Tensor | None = None) -> None:
        self._head, self._steps = head, steps
        self._rows = rows_of(head, support) if steps else None
        self._sums: Sums | None = None
        self._x: list[Tensor] = []
        self._wanted: list[Wanted] = []
        self._began = time.perf_counter()

    def wanted(self, y: Tensor) -> Wanted | None:
        """What the steps need of the target's final states [n, H]; several exits share it. None where no steps follow."""
        return None if self._rows is None else Wanted(*expected(y, self._rows, CHUNK))

    def add(self, x: Tensor, y: Tensor, wanted: Wanted | None = None) -> None:
        """n more tokens: features [n, F] and the target's final states [n, H]."""
        if not len(x):
            return
        if self._sums is None:
            self._sums = Sums(x.shape[1], y.shape[1], x.device)
        self._sums.add(x, y)
        if wanted is not None:
            self._x.append(x.float())
            self._wanted.append(wanted)

    def fit(self, held_out: list[tuple[Tensor, Tensor]], now: Logits) -> tuple[Tensor | None, Fit]:
        """The map [H, F] that accepts most on held-out pairs (x, y), None where that is `now`, and what it is worth."""
        if self._sums is None:
            raise ValueError("no scored token to fit the warm start on")
        self._sums.check()
        judge = Judge(held_out, self._head)
        found = [Found(judge.choice(judge.mapped(map_)), strength, 0, map_) for strength, map_ in self._ridges()]
        best = max(found, key=lambda one: one.acceptance)
        if self._steps:
            best = max([best, *self._steps_from(best, judge)], key=lambda one: one.acceptance)
        before = judge.worth(now)
        if judge.choice(now) >= best.acceptance:
            best = best._replace(strength=None, steps=0, map=None)
        after = before if best.map is None else judge.worth(judge.mapped(best.map))
        seconds = time.perf_counter() - self._began
        return best.map, Fit(best.strength, best.steps, after[0], before[0], after[1], before[1], self._sums.tokens, seconds)

    def _ridges(self) -> Iterator[tuple[float, Tensor]]:
        assert self._sums is not None
        for strength in STRENGTHS:
            yield strength, self._sums.solve(strength).to(self._head.linear.weight.device, torch.float32)

    def _steps_from(self, ridge: Found, judge: Judge) -> Iterator[Found]:
        assert self._rows is not None and ridge.map is not None
        x, wanted = torch.cat(self._x), torch.cat([one.rows for one in self._wanted])
        mass = torch.stack([one.mass for one in self._wanted]).sum(0) / len(x)
        for number, map_ in enumerate(sharpened(x, wanted, mass, self._rows, ridge.map, self._steps, CHUNK), start=1):
            yield Found(judge.choice(judge.mapped(map_)), ridge.strength, number, map_)


class Found(NamedTuple):
    acceptance: float
    strength: float | None
    steps: int
    map: Tensor | None


class Judge:
    """Held-out positions, evenly spaced: every other one chooses among fits, and the rest say what the chosen one is worth."""

    def __init__(self, held_out: list[tuple[Tensor, Tensor]], head: Head) -> None:
        if (count := sum(len(x) for x, _ in held_out)) < 2:
            raise ValueError(f"{count} held-out tokens cannot choose a warm start and judge it; hold more rows back")
        x, y = torch.cat([one for one, _ in held_out]), torch.cat([one for _, one in held_out])
        some = torch.linspace(0, len(x) - 1, min(len(x), 2 * JUDGES), device=x.device).long()
        self._head = head
        self._choosing, self._judging = (x[some[0::2]], y[some[0::2]]), (x[some[1::2]], y[some[1::2]])

    def mapped(self, map_: Tensor) -> Logits:
        return lambda x: self._head((x.float() @ map_.T).to(self._head.linear.weight.dtype))

    def choice(self, logits: Logits) -> float:
        """Mean acceptance where it chooses."""
        return self._worth(logits, *self._choosing)[0]

    def worth(self, logits: Logits) -> tuple[float, float]:
        """Mean acceptance at temperature 1, and how often both name one id, where it judges."""
        return self._worth(logits, *self._judging)

    def _worth(self, logits: Logits, x: Tensor, y: Tensor) -> tuple[float, float]:
        sums = judged(x, logits, Dense(y, self._head), Asked({}, CHUNK))
        return float(sums["acceptance"] / sums["judged"]), float(sums["agreement"] / sums["judged"])
