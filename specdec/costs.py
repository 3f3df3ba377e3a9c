"""What a round takes on this machine: medians of what was measured, and guesses, said to be such, for what was not yet."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from draftsmith.specdec.chances import MEMORY

REMEMBERED = 9
LATEST = 3  # of plain steps count: they are what everything is compared with, and few are taken while drafting pays
STEADY = 1.3  # a plain step that differs more than this from the median belongs to other times
CHEAP = 0.03  # plain steps that an unknown column or word of a model is thought to take: little, so that it gets tried,
DEAR = 0.5  # and much where the trial is paid for beforehand


class Costs:
    """Seconds of a target call by rows and columns fed a row, and of a proposal by who drafts (a model?), rows and k."""

    def __init__(self) -> None:
        self._seen: dict[tuple, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._target: dict[int, dict[int, float]] = defaultdict(dict)  # rows -> columns -> seconds
        self._draft: dict[tuple[bool, int], dict[int, float]] = defaultdict(dict)  # (a model?, rows) -> k -> seconds
        self._won: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])  # rows -> tokens, seconds; the older, the fainter

    def saw_target(self, rows: int, columns: int, seconds: float) -> None:
        seen = self._seen[rows, columns]
        if columns == 1 and seen and not seconds / STEADY < self._target[rows][1] < seconds * STEADY:
            seen.clear()  # the machine, or the length of the text, is not what it was: three new ones decide
        seen.append(seconds)
        self._target[rows][columns] = median(list(seen)[-LATEST:] if columns == 1 else seen)

    def saw_draft(self, by_model: bool, rows: int, k: int, seconds: float) -> None:
        seen = self._seen[by_model, rows, k]
        seen.append(seconds)
        self._draft[by_model, rows][k] = median(seen)

    def won(self, rows: int, tokens: float, seconds: float) -> None:
        """A round's tokens over all rows, and all that it took."""
        before = self._won[rows]
        before[:] = MEMORY * before[0] + tokens, MEMORY * before[1] + seconds

    def worth(self, rows: int, plain: float) -> float:
        """Of a second: the tokens that the last rounds won in one, at least as many as plain steps do."""
        tokens, seconds = self._won[rows]
        return max(rows / plain, tokens / seconds if seconds else 0.0)

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step of so many rows; None before three were seen, for the first ones of all are often slow."""
        return self._target[rows][1] if len(self._seen[rows, 1]) >= 3 else None

    def knows(self, rows: int, columns: int) -> bool:
        return columns in self._target[rows]

    def target(self, rows: int, columns: int, unknown: float = CHEAP) -> float:
        """Seconds of a call, once `plain(rows)` is known: a straight line between two measured widths, and beyond the widest
        `unknown` plain steps more a column."""
        seen = self._target[rows]
        if columns in seen:
            return seen[columns]
        below = max(n for n in seen if n < columns)
        above = min((n for n in seen if n > columns), default=None)
        if above is None:
            return seen[below] + unknown * seen[1] * (columns - below)
        return seen[below] + (seen[above] - seen[below]) * (columns - below) / (above - below)

    def draft(self, by_model: bool, rows: int, k: int, unknown: float = CHEAP) -> float:
        """Seconds of a proposal of k tokens, a model's in proportion to the nearest known k; a lookup is free until measured."""
        seen = self._draft[by_model, rows]
        if k in seen:
            return seen[k]
        if not seen:
            return unknown * k * self._target[rows][1] if by_model else 0.0
        nearest = min(seen, key=lambda n: abs(n - k))
        return seen[nearest] * (k / nearest if by_model else 1.0)
