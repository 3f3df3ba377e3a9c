"""Steps whose loss or gradient is not finite: a run ends at the first, with its rows named, or passes over as many as the recipe allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.distill import Batch
from draftsmith.recipes import runs
from draftsmith.train.stored.shards import places


class Skips:
    """The steps that were passed over, at most `most` of them. Part of a checkpoint, so that a run that goes on has no more of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.steps: list[int] = []

    def take(self, step: int) -> bool:
        """Is `step` passed over?"""
        if len(self.steps) >= self.most:
            return False
        self.steps.append(step)
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def keys(micro: list[Batch], accelerator: Accelerator) -> list[str]:
    """The rows of a step on all processes: the key that a stored teacher has them under, their scored tokens, and how they begin."""
    mine = []
    for batch in micro:
        scored = [row for row in batch.rows() if row[1].any()]
        for place, (ids, _) in zip(places(batch), scored, strict=True):
            mine.append(
                f"{place.key.hex()} ({place.scored} scored of {len(ids)} tokens: {' '.join(map(str, ids[:8].tolist()))} ...)"
            )
    return gather_object(mine)


@contextmanager
def last_good_named(folder: Path) -> Iterator[None]:
    """A FloatingPointError out of the block says which checkpoint a run goes on from."""
    try:
        yield
    except FloatingPointError as error:
        done = runs.steps(folder)
        last = f"The last good checkpoint is {done[-1]}" if done else f"There is no checkpoint in {folder} yet"
        raise FloatingPointError(f"{error}. {last}") from error
