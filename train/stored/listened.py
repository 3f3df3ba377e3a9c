"""Asking a target what it says of rows, and the teacher that reads the answers from a store ever after."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from draftsmith.distill import Batch, Signal, collate
from draftsmith.distill.batch import Example, in_batches
from draftsmith.distill.teacher import HiddenTeacher, Teacher
from draftsmith.distill.top_k import Listened, TopK, top_k
from draftsmith.train.stored.columns import About, to_listened
from draftsmith.train.stored.shards import places
from draftsmith.train.stored.store import Ask, no_bars, opened


def ask_live(
    teacher: HiddenTeacher, k: int, temperature: float = 1.0, support: Tensor | None = None, batch_size: int = 8, chunk: int = 128
) -> Ask:
    """Ask a target in this process; logits exist for `chunk` positions at a time."""
    device = teacher.head.linear.weight.device
    support = None if support is None else support.to(device)

    @torch.no_grad()
    def ask(rows: list[Example]) -> list[Listened]:
        said: list[Listened] = []
        for batch in in_batches(rows, device, batch_size):
            hidden = teacher.hidden(batch)
            parts = [top_k(teacher.head(some), k, temperature, support) for some in hidden.split(chunk)]
            whole = [None if part[0] is None else torch.cat(part).cpu() for part in zip(*parts, strict=True)]
            ends = batch.scored.sum(1).cumsum(0).tolist()
            said += [Listened(*whole).picked(slice(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]  # type: ignore[arg-type]
        return said

    return ask


class ListenedTeacher:
    """A teacher that reads what `folder` holds; every row of `rows` must be there.

    A batch of other rows (held-out ones, say) goes to `live` where one is given, and is refused where none is.
    """

    def __init__(
        self, folder: Path, about: About, rows: list[Example], support: Tensor | None = None, live: Teacher | None = None
    ) -> None:
        files = [str(path) for path in opened(folder, about)]
        self.rows, self._about, self._support, self._live = int(about["vocabulary"]), about, support, live
        with no_bars():
            self._data = Dataset.from_parquet(files, cache_dir=str(folder / "read")).with_format("arrow")
        self._where = {key: place for place, key in enumerate(self._data.data.column("key").to_pylist())}
        wanted = {place.key.hex() for row in rows for place in places(collate([row]))}
        if missing := len(wanted - self._where.keys()):
            raise ValueError(
                f"{folder} holds {len(self._where)} rows and lacks {missing} of the {len(wanted)} asked for; a draft is not taught by "
                "what is left. Make a store of these rows in another folder"
            )

    def signal(self, batch: Batch) -> Signal:
        found = [place.key.hex() for place in places(batch)]
        unknown = sum(key not in self._where for key in found)
        if unknown and self._live is not None:
            return self._live.signal(batch)
        if unknown:
            raise ValueError(f"{unknown} of the {len(found)} rows of a batch are not in the store, and no live target was given")
        device = batch.ids.device
        some = self._data[[self._where[key] for key in found]] if found else self._data[:0]
        support = None if self._support is None else self._support.to(device)
        return TopK(to_listened(some, self._about, device), self._about["temperature"], support)
