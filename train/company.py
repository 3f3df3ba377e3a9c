"""The processes of a run learn of each other's end by a file each in the run folder, not by a collective that fails or waits for hours.

Each holds a lock on its own file as long as it lives, and writes in it every second. A lock that is free tells of a process that was
killed, on whatever machine the folder is seen; silence tells of a machine that is gone, whose locks nobody gives back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from draftsmith.recipes import runs
from draftsmith.recipes.progress import give_back

LOOK = 1.0  # seconds between two signs of life, and two looks at the others
GRACE = 10.0  # seconds in which the block may find out by itself: gloo's collectives fail at once, NCCL's wait
RECORD = 2048  # bytes of a file, written at one go over what was there
KILLED, SILENT, ENDED = range(3)  # why one is missed; the first of these is the cause, and what others say of it is an echo


class Missing(NamedTuple):
    """A process that is there no more."""

    why: int
    rank: int
    told: str


class Presence:
    """This process's file: a lock while it lives, a counter while it breathes, a word when it ends."""

    def __init__(self, folder: Path, rank: int, launch: str) -> None:
        self.path = folder / f"{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._about: dict[str, Any] = {"launch": launch, "rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: a forked worker would inherit that one
            self._about["locked"] = True
        except OSError:  # a file system without locks, or a process of an earlier launch that is still on its way out
            self._about["locked"] = False
        self._signs, self._one = 0, threading.Lock()
        self._ended: str | None = None
        self.breathe()

    def breathe(self) -> None:
        with self._one:
            self._signs += 1
            text = json.dumps(self._about | {"signs": self._signs, "ended": self._ended})
            with contextlib.suppress(OSError):  # a full disk is told of by those who have something to write
                os.pwrite(self._file, text.encode().ljust(RECORD), 0)

    def end(self, word: str) -> None:
        self._ended = word[: RECORD // 4]  # an escaped character takes six
        self.breathe()

    def leave(self) -> None:
        """Done, as all the others are."""
        self.end("")
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last one finds it empty
            self.path.parent.rmdir()


class Others:
    """What the files of the other processes say. `lost_after` seconds of silence count, 0 never."""

    def __init__(self, folder: Path, rank: int, world: int, launch: str, lost_after: float) -> None:
        self._folder, self._ranks, self._world = folder, [one for one in range(world) if one != rank], world
        self._launch, self._lost_after = launch, lost_after
        self._heard: dict[int, tuple[int, float]] = {}
        self._about: dict[int, dict[str, Any]] = {}

    def missing(self) -> list[Missing]:
        """Those that are gone and were not done."""
        found = [one for rank in self._ranks if (one := self._look(rank)) is not None]
        return sorted(found)

    def _look(self, rank: int) -> Missing | None:
        held, now = True, time.monotonic()
        # ValueError: read in the middle of a sign of life.
        with contextlib.suppress(OSError, ValueError), (self._folder / f"{rank}.json").open("rb") as file:
            locked = _locked(file.fileno())  # before it is read: who ends with a word writes it before the lock is free
            about = json.loads(file.read())
            if about["launch"] == self._launch:
                self._about[rank], held = about, locked or not about["locked"]
        about = self._about.get(rank)
        if about is None or about["ended"] == "":
            return None
        signs, since = self._heard.get(rank, (-1, now))
        if about["signs"] != signs:
            self._heard[rank], since = (about["signs"], now), now
        who = f"process {rank} of {self._world} (host {about['host']}, pid {about['pid']})"
        if about["ended"]:
            return Missing(ENDED, rank, f"{who} ended with {about['ended']}")
        if not held:
            return Missing(KILLED, rank, f"{who} is gone: it was killed, or crashed, without a word")
        # Where this machine's kernel says that it lives, it does, however long it is kept from writing.
        known = about["locked"] and about["host"] == socket.gethostname()
        if self._lost_after and not known and now - since > self._lost_after:
            return Missing(SILENT, rank, f"{who} gave no sign of life for {now - since:.0f} s: its machine or the network is gone")
        return None


@contextmanager
def company(folder: Path, accelerator: Accelerator, lost_after: float) -> Iterator[None]:
    """While a block runs, a process that is gone ends the others with its name and exit code 2, out of whatever they wait in."""
    rank, world = accelerator.process_index, accelerator.num_processes
    if world == 1:
        yield
        return
    launch, place = broadcast_object_list([uuid.uuid4().hex])[0], folder / "processes"
    own, others, over = Presence(place, rank, launch), Others(place, rank, world, launch, lost_after), threading.Event()
    accelerator.wait_for_everyone()
    threading.Thread(target=_watch, args=(own, others, folder, over), daemon=True).start()
    try:
        yield
        accelerator.wait_for_everyone()  # who is done before the others are is no less missed
        over.set()
        own.leave()
    except BaseException as error:
        own.end(f"{type(error).__name__}: {error}")
        told = _cause(error, others)
        if told is None:
            over.set()
            raise
        # Not raised: what unwinds destroys the process group, which now and then waits for the dead one, and lets no thread run while it does.
        _leave(told, folder)


def _watch(own: Presence, others: Others, folder: Path, over: threading.Event) -> None:
    since = None
    while not over.wait(LOOK):
        own.breathe()
        missing = others.missing()
        since = (since or time.monotonic()) if missing else None
        if missing and since and time.monotonic() - since > GRACE:
            _leave(missing[0], folder)  # the main thread waits in a collective, and hears no exception


def _leave(missing: Missing, folder: Path) -> NoReturn:
    give_back()
    sys.stdout.flush()
    os.write(2, f"\ndraftsmith train: {_line(missing, folder)}\n".encode())
    os._exit(2)


def _cause(error: BaseException, others: Others) -> Missing | None:
    """Who is missed, where an error is what comes of that: a collective's, or the launcher's SIGTERM to those that are left."""
    collective, asked = isinstance(error, (RuntimeError, ConnectionError)), isinstance(error, KeyboardInterrupt)
    if not collective and not asked:
        return None
    deadline = time.monotonic() + 2 * LOOK  # the kernel closes a dead process's connections before its locks
    while not (missing := others.missing()) and time.monotonic() < deadline:
        time.sleep(LOOK / 20)
    if not missing or (asked and missing[0].why == ENDED):
        return None
    own = f"{type(error).__name__}: {error}"[:100]
    return None if own in missing[0].told else missing[0]  # all processes ran into the same


def _line(missing: Missing, folder: Path) -> str:
    done = runs.steps(folder)
    last = (
        f"The last good checkpoint is {done[-1]}, and the same command goes on from it"
        if done
        else f"There is no checkpoint in {folder} yet; the same command begins anew"
    )
    return f"{missing.told}. {last}"


def _locked(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
