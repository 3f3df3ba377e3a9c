"""One map in the making: a ridge from sums alone, held-out tokens that choose its strength, and others that judge it."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.chunked import Asked, judged
from draftsmith.distill.head import Head, Logits
from draftsmith.distill.signal import Dense
from draftsmith.distill.warm.least_squares import Sums

JUDGES = 1024  # held-out positions: every fourth chooses, and the others say what was chosen is worth
TO_NOTHING = (1e-6, 1e-4, 1e-3, 1e-2)  # strengths of the ridge, of the mean squared feature: where it pulls the map to 0,
TO_START = (1e-2, 1e-1, 1.0)  # and where it pulls it to what it was
CHUNK = 64  # positions whose logits exist at one time


class Fit(NamedTuple):
    """What was fitted and what it is worth on held-out tokens that neither fitted nor chose it, beside what was there before.

    `strength` is the ridge that was chosen, and `pull` what it pulls to, nothing or the start; None where no fit was better.
    """

    strength: float | None
    pull: str | None
    acceptance: float
    before: float
    agreement: float
    agreement_before: float
    tokens: int
    seconds: float


class Fitting:
    """Sums for the ridge as tokens come: the states themselves are not kept."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sums: Sums | None = None
        self._began = time.perf_counter()

    def add(self, x: Tensor, y: Tensor) -> None:
        """n more tokens: features [n, F] and the target's final states [n, H]."""
        if self._sums is None:
            self._sums = Sums(x.shape[1], y.shape[1], x.device)
        self._sums.add(x, y)

    @property
    def moments(self) -> Tensor:
        """X'X over the tokens seen: [F, F]."""
        if self._sums is None:
            raise ValueError("no scored token to fit the warm start on")
        return self._sums.xx

    def fit(self, held_out: list[tuple[Tensor, Tensor]], now: Logits, start: Tensor | None = None) -> tuple[Tensor | None, Fit]:
        """The map [H, F] that accepts most on held-out pairs (x, y), None where that is `now`, and what it is worth.

        The ridge pulls it to nothing and, where there is one, to the map `start` [H, F] as well; held-out tokens say which.
        """
        if self._sums is None:
            raise ValueError("no scored token to fit the warm start on")
        self._sums.check()
        judge = Judge(held_out, self._head)
        best = max((self._found(judge, strength, toward) for strength, toward in _pulls(start)), key=lambda one: one.acceptance)
        before = judge.worth(now)
        if judge.choice(now) >= best.acceptance:
            best = Found(0.0, None, None, None)
        after = before if best.map is None else judge.worth(judge.mapped(best.map))
        seconds = time.perf_counter() - self._began
        return best.map, Fit(best.strength, best.pull, after[0], before[0], after[1], before[1], self._sums.tokens, seconds)

    def _found(self, judge: Judge, strength: float, toward: Tensor | None) -> Found:
        assert self._sums is not None
        map_ = self._sums.solve(strength, toward).to(self._head.linear.weight.device, torch.float32)
        return Found(judge.choice(judge.mapped(map_)), strength, "nothing" if toward is None else "start", map_)


def _pulls(start: Tensor | None) -> list[tuple[float, Tensor | None]]:
    return [(one, None) for one in TO_NOTHING] + ([] if start is None else [(one, start) for one in TO_START])


class Found(NamedTuple):
    acceptance: float
    strength: float | None
    pull: str | None
    map: Tensor | None


class Judge:
    """Held-out positions, evenly spaced: some choose among fits, and the rest say what the chosen one is worth."""

    def __init__(self, held_out: list[tuple[Tensor, Tensor]], head: Head) -> None:
        if (count := sum(len(x) for x, _ in held_out)) < 2:
            raise ValueError(f"{count} held-out tokens cannot choose a warm start and judge it; hold more rows back")
        x, y = torch.cat([one for one, _ in held_out]), torch.cat([one for _, one in held_out])
        some = torch.linspace(0, len(x) - 1, min(len(x), JUDGES), device=x.device).long()
        self._head = head
        chooses = torch.arange(len(some), device=x.device) % 4 == 0
        self._choosing, self._judging = ((x[some[which]], y[some[which]]) for which in (chooses, ~chooses))

    def mapped(self, map_: Tensor) -> Logits:
        return lambda x: self._head((x.float() @ map_.T).to(self._head.linear.weight.dtype))

    def choice(self, logits: Logits) -> float:
        """Mean acceptance where it chooses."""
        return self._worth(logits, *self._choosing)[0]

    def worth(self, logits: Logits) -> tuple[float, float]:
        """Mean acceptance at temperature 1, and how often both name one id, where it judges."""
        return self._worth(logits, *self._judging)

    def _worth(self, logits: Logits, x: Tensor, y: Tensor) -> tuple[float, float]:
        each = judged(x, logits, Dense(y, self._head), Asked({}, CHUNK))
        return float(each.low.mean()), float(each.agrees.float().mean())
