"""Progress with an estimate: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Says how far a long work is and when it will end, from the pace since the first step (steps found done are not counted)."""

    def __init__(self, what: str, total: int, unit: str = "steps", every_seconds: float = 10.0, quiet: bool = False) -> None:
        self._what, self._total, self._unit, self._every, self._quiet = what, total, unit, every_seconds, quiet
        self._live = sys.stderr.isatty()
        self._first: tuple[int, float] | None = None
        self._said = 0.0
        self._started = time.monotonic()

    def at(self, number: int, note: str = "") -> None:
        """`number` of `total` are done."""
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
        if self._quiet or now - self._said < (0.2 if self._live else self._every):
            return
        self._said = now
        done, since = number - self._first[0], now - self._first[1]
        left = f", {_clock(since / done * (self._total - number))} left" if done > 0 else ""
        self._say(f"{self._what}: {number}/{self._total} {self._unit}{left}{'; ' + note if note else ''}")

    def done(self, note: str = "") -> None:
        if not self._quiet:
            self._say(
                f"{self._what}: {self._total} {self._unit} in {_clock(time.monotonic() - self._started)}{'; ' + note if note else ''}"
            )
            if self._live:
                print(file=sys.stderr)

    def _say(self, line: str) -> None:
        print(f"\r\033[K{line}" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
