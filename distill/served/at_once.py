"""Many rows asked of a server at once: results in order, and a row that fails costs the others nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Unanswered(RuntimeError):
    """Some rows got no answer. `done` holds the others' in order, with None for these; `why` says it of each that was tried."""

    def __init__(self, done: Sequence[Any], why: dict[int, Exception]) -> None:
        missing, first = sum(one is None for one in done), min(why)
        super().__init__(f"{missing} of {len(done)} rows have no answer; row {first + 1}: {why[first]}")
        self.done, self.why = list(done), why


def each(work: Callable[[T], R], rows: Sequence[T], workers: int, said: Callable[[int, int], None] | None = None) -> list[R]:
    """`work` of every row, `workers` at a time, in the rows' order; `said(done, of)` is called as they come.

    Unanswered, which holds what came, where a row failed. The others are asked all the same, unless the fault is one that
    they would meet too. The threads are daemons, so an interrupt need not wait for answers that nobody will read.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    came: queue.SimpleQueue[tuple[int, Any, Exception | None] | None] = queue.SimpleQueue()
    stop = threading.Event()
    for at in range(len(rows)):
        waiting.put(at)

    def run() -> None:
        try:
            while not stop.is_set():
                at = waiting.get_nowait()
                try:
                    came.put((at, work(rows[at]), None))
                except Exception as error:
                    if getattr(error, "hopeless", False):
                        stop.set()
                    came.put((at, None, error))
        except queue.Empty:
            pass
        finally:
            came.put(None)

    running = min(workers, len(rows))
    for _ in range(running):
        threading.Thread(target=run, daemon=True).start()
    done: list[Any] = [None] * len(rows)
    why: dict[int, Exception] = {}
    number = 0
    try:
        while running:
            one = came.get()
            if one is None:
                running -= 1
                continue
            at, done[at], error = one
            if error is not None:
                why[at] = error
            number += 1
            if said is not None:
                said(number, len(rows))
    finally:
        stop.set()
    if why:
        raise Unanswered(done, why) from why[min(why)]
    return done
