"""Progress with an estimate: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from typing import Any

LIVE: set[Progress] = set()  # those with a bar on the terminal, which a thread of rich's draws until it is stopped


@atexit.register
def give_back() -> None:
    """Take all bars from the terminal, and show its cursor again; for ends that come as an error, or by os._exit."""
    for one in [*LIVE]:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone needs no cursor, and the next may be there
            one.stop()


class Progress:
    """Says how far a long work is and when it will end, from the pace since the first step (steps found done are not counted)."""

    def __init__(self, what: str, total: int, unit: str = "steps", every_seconds: float = 10.0, quiet: bool = False) -> None:
        self._what, self._total, self._unit, self._every, self._quiet = what, total, unit, every_seconds, quiet
        self._first: tuple[int, float] | None = None
        self._said = 0.0
        self._started = time.monotonic()
        self._bar: Any = None
        from rich.console import Console  # here, for a command that is soon done has no bar, and would wait for this longest

        console = Console(stderr=True)
        # rich takes FORCE_COLOR for a terminal; a log file wants lines all the same.
        if console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty() and not quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            # What is printed comes above the bar; rich would send it to stderr too, so only where stdout is the terminal as well.
            self._bar = Bar(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
            self._task = self._bar.add_task(what, total=total, note="")
            self._bar.start()
            LIVE.add(self)

    def at(self, number: int, note: str = "") -> None:
        """`number` of `total` are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=number, note=note)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
        if self._quiet or now - self._said < self._every:
            return
        self._said = now
        done, since = number - self._first[0], now - self._first[1]
        left = f", {clock(since / done * (self._total - number))} left" if done > 0 else ""
        self._say(f"{number}/{self._total} {self._unit}{left}{'; ' + note if note else ''}")

    def stop(self) -> None:
        """The work ends early: give the terminal back."""
        if self._bar is not None:
            LIVE.discard(self)
            self._bar.stop()

    def done(self, note: str = "") -> None:
        self.stop()
        if not self._quiet:
            self._say(f"{self._total} {self._unit} in {clock(time.monotonic() - self._started)}{'; ' + note if note else ''}")

    def _say(self, line: str) -> None:
        print(f"{self._what}: {line}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
