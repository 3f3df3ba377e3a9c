"""A signal is a wish that a run grants between two steps: SIGTERM and SIGINT a checkpoint and an end, SIGUSR1 a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from draftsmith.recipes.progress import LIVE

RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h: the same command, later, goes on
CURSOR = b"\x1b[?25h"  # what shows it, where a bar has hidden it
TOGETHER = 1.0  # seconds in which a signal that comes twice came once: the terminal and the launcher both hand on one Ctrl-C


class Interrupted(KeyboardInterrupt):
    """The run was asked to end, and did so where the same command goes on. Like KeyboardInterrupt no library takes it for an error."""


class Wishes(NamedTuple):
    """What signals asked for since they were last looked at: a checkpoint now; and then the end of the run."""

    save: bool
    leave: bool


class Signals:
    """SIGTERM, SIGINT and SIGUSR1 while a block runs; Python lets only a main thread have them, and elsewhere they stay as they are.

    Inside `steps()` they are wishes. Outside of it SIGTERM and SIGINT raise `Interrupted` at once, for everything that is made before
    the first step, or behind the last, is made again from where it was. A second one, a second after the first, ends the process as
    if none of this were there. `steps`: will there be any?
    """

    def __init__(self, steps: bool = True) -> None:
        self._steps = steps
        self.name = ""  # of the signal that asked for the end
        self._at, self._in_steps = 0.0, False
        self._saves, self._granted = 0, 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGTERM, signal.SIGINT):
                self._before[one] = signal.signal(one, self._leave)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)  # None: it was not Python that set it

    @contextmanager
    def steps(self) -> Iterator[None]:
        """The steps: a signal waits for the end of the one under way."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False

    def wishes(self) -> Wishes:
        """What this process was asked for; a checkpoint is asked for once."""
        saves = self._saves
        save, self._granted = saves > self._granted, saves
        return Wishes(save or bool(self.name), bool(self.name))

    def _leave(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if os.getpid() != self._process:  # a worker forked from this one has no checkpoint to write
            _as_ever(number)
            return
        if self.name and now - self._at < TOGETHER:
            return
        if self.name:
            if LIVE:
                os.write(2, CURSOR)  # nothing of ours runs any more
            _as_ever(number)
            return
        self.name, self._at = name, now
        if not self._in_steps:
            raise Interrupted(f"{name}: ended; the same command goes on where it was")
        _say(f"{name}: a checkpoint comes after this step, then the end; again to leave at once")

    def _save(self, number: int, frame: FrameType | None) -> None:
        self._saves += 1
        if not self._steps:
            _say("SIGUSR1: nothing is trained now, so there is no checkpoint to write; what was done is kept")
            return
        _say(f"SIGUSR1: a checkpoint comes after {'this' if self._in_steps else 'the first'} step")


def _as_ever(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say(line: str) -> None:
    os.write(2, f"\n{line}\n".encode())  # print is not to be called while it may be in the middle of another line
