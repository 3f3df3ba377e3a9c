"""The target's final hidden states, kept on disk: the target runs once over each row, however many epochs read it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftsmith.distill import Batch, LiveTeacher, collate
from draftsmith.distill.batch import Example, Row, in_batches
from draftsmith.distill.signal import Dense
from draftsmith.recipes.files import room_for, whole_file
from draftsmith.recipes.progress import Progress
from draftsmith.train.sharded import asked_by_any, in_step
from draftsmith.train.stored.shards import fingerprint, places, shards

ROWS_A_SHARD = 16


class StoredTeacher:
    """A teacher that reads what the target said of `rows` from `folder`, making it first where it is not there.

    A shard is 16 rows of like length, one safetensors file [scored tokens, H] that names the target revision and the
    rows it is of; another target or other rows are refused. The batches that fill it hang on the rows alone, so the
    states are the same bits whether or not the making was interrupted. Processes share the making.
    """

    def __init__(self, teacher: LiveTeacher, folder: Path, rows: Sequence[Row], revision: str, accelerator: Accelerator) -> None:
        self.head, self.rows = teacher.head, teacher.rows
        self._teacher = teacher
        self._where: dict[bytes, tuple[Path, int, int]] = {}
        self._open: dict[Path, Any] = {}
        self._ask = asked_by_any(teacher.target, accelerator)
        width = teacher.head.linear.weight.shape[1]
        plan = shards(rows, ROWS_A_SHARD)
        tokens = sum(row.scored for shard in plan for row in shard)
        missing = sum(row.scored for at, shard in enumerate(plan) if not _path(folder, at).is_file() for row in shard)
        if accelerator.is_main_process:
            room_for(folder, missing * width * 4, folder)
        accelerator.wait_for_everyone()
        progress = Progress("listening to the target", len(plan), unit="shards", quiet=not accelerator.is_main_process)
        with in_step(teacher.target, accelerator):
            for number, shard in enumerate(plan):
                path = _path(folder, number)
                about = f"{revision} {fingerprint(shard)}"
                if number % accelerator.num_processes == accelerator.process_index:
                    self._make(path, about, shard)
                    progress.at(number + 1)
                at = 0
                for place in places(collate(shard)):
                    self._where[place.key] = (path, at, at + place.scored)
                    at += place.scored
        accelerator.wait_for_everyone()
        progress.done(f"{tokens} tokens, {tokens * width * 4 / 1e6:.0f} MB in {folder}")

    def hidden(self, batch: Batch) -> Tensor:
        """[N, H] as the live target would say it; a batch of rows that are not stored is asked live, and a sharded target by all
        processes where one has such a batch."""
        device = batch.ids.device
        found = [self._where.get(place.key) for place in places(batch)]
        known = [one for one in found if one is not None]
        if self._ask(len(known) < len(found)):
            return self._teacher.hidden(batch)
        if not known:
            return torch.zeros(0, self.head.linear.weight.shape[1], dtype=self.head.linear.weight.dtype, device=device)
        return torch.cat([self._states(path)[start:end] for path, start, end in known]).to(device)

    def signal(self, batch: Batch) -> Dense:
        return Dense(self.hidden(batch), self.head)

    def _states(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_slice("states")

    def _make(self, path: Path, about: str, shard: list[Example]) -> None:
        if path.is_file():
            _check(path, about)
            return
        device = self._teacher.target.device
        states = torch.cat([self._teacher.hidden(batch) for batch in in_batches(shard, device)])
        with whole_file(path) as beside:
            # Not save_file, which writes to a file of its own first: a kill would leave that behind.
            states = states.cpu().contiguous()
            # One key: safetensors writes several in an order that changes from one process to the next.
            beside.write_bytes(save({"states": states}, metadata={"of": f"{about} {_sum(states)}"}))


def _check(path: Path, about: str) -> None:
    try:
        with safe_open(path, framework="pt") as found:
            there, states = (found.metadata() or {}).get("of", ""), found.get_tensor("states")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, and the same command makes it anew") from error
    if there == about:  # written before shards had a sum
        return
    if not there.startswith(f"{about} "):
        raise ValueError(f"{path} holds states of another target or of other rows; remove {path.parent} to make them anew")
    if there != f"{about} {_sum(states)}":
        raise ValueError(
            f"{path} is damaged (its states are not those it was written with); remove it, and the same command makes it anew"
        )


def _sum(states: Tensor) -> str:
    return hashlib.sha256(states.view(torch.uint8).numpy().data).hexdigest()


def _path(folder: Path, number: int) -> Path:
    return folder / f"states-{number:05}.safetensors"
