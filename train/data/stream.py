"""Rows from files that no memory holds. Records are read in order, a block at a time, and shuffled within their block, so that a
place in the stream is a place in the files: no row waits in a buffer to be lost, or seen twice, when a run goes on."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.distill.batch import Example
from draftsmith.train.data.chats import Made, asked, chat_of
from draftsmith.train.data.plan import Plan

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
START: dict[str, Any] = {"epoch": 0, "block": 0, "source": None, "first": 0}
EDGE = 1 << 16  # bytes at each end of a file that are hashed: all of them would take as long as reading it
Record = dict[str, Any]


class Stream:
    """An `Order` over JSONL or parquet files, for `steps` steps; when they end they are read again, in another order of files.

    `read` makes the rows of a record. `block` records are held at a time and go through a `Plan` of their own, the last step
    of which may be smaller. Every process reads all records and takes its share of each step, so the steps are the same for
    any number of processes. `held_out` is the share of records, told apart by what they say, that no step gives out.
    `of` is what the rows hang on besides the files (`all_rows.fingerprint`).
    """

    def __init__(
        self, files: Sequence[Path], read: Callable[[Record], Made], size: int, steps: int, seed: int, *, block: int = 4096,
        pack: int = 0, held_out: float = 0.0, of: str = "",
    ) -> None:  # fmt: skip
        kinds = {BUILDERS.get(path.suffix) for path in files}
        if len(kinds) != 1 or None in kinds:
            raise ValueError(f"a stream reads files of one kind, .jsonl or .parquet; found {', '.join(map(str, files)) or 'none'}")
        self.size, self.steps = size, steps
        self._kind, self._files, self._read, self._seed = str(kinds.pop()), sorted(files), read, seed
        self._block, self._pack, self._share = block, pack, held_out
        told = [[(path.name, *_digest(path)) for path in self._files], seed, size, block, pack, held_out, of]
        self.fingerprint = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
        self.left_out: Counter[str] = Counter()  # since this process began to read
        self.counted: Counter[str] = Counter()
        self._place, self._blocks = START, self._read_on(START)
        self._plan: Plan | None = None

    def step(self, number: int) -> Sequence[Example | list[Example]]:
        """The rows of step `number`; one before the block at hand is looked for from the beginning of the files."""
        if number < self._place["first"]:
            self.go_to(START)
        while self._plan is None or number >= self._place["first"] + self._plan.steps:
            first = self._place["first"] + (self._plan.steps if self._plan else 0)
            place, rows = next(self._blocks)
            self._plan = Plan(rows, self.size, 1, f"{self._seed}/{place['epoch']}/{place['block']}", self._pack)
            self._place = {**place, "first": first}
        return self._plan.step(number - self._place["first"])

    def state(self) -> dict[str, Any]:
        """Where the block of the last step begins, in the files and in steps."""
        return self._place

    def go_to(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken: its block is read anew by the next step."""
        self._place, self._blocks, self._plan = state, self._read_on(state), None

    def held_out(self, rows: int) -> list[Example]:
        """The first rows of the records held out, `rows` of them or what the files have."""
        found: list[Example] = []
        for record in self._source(0):
            if len(found) >= rows:
                break
            if self._is_held(record):
                found += self._read(record).rows
        return found[:rows]

    def _read_on(self, state: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Example]]]:
        epoch, block, source = state["epoch"], state["block"], state["source"]
        while True:
            data, whole, found = self._source(epoch), source is None, False
            if source is not None:
                data.load_state_dict(source)
            records = iter(data)
            while some := list(islice(records, self._block)):
                rows = self._rows(some)
                found |= bool(rows)
                yield {"epoch": epoch, "block": block, "source": source}, rows
                block, source = block + 1, data.state_dict()
            if whole and not found:
                raise ValueError(f"{', '.join(map(str, self._files))} leave no row to train on; left out: {dict(self.left_out)}")
            epoch, block, source = epoch + 1, 0, None

    def _rows(self, records: list[Record]) -> list[Example]:
        rows = []
        for record in records:
            if not self._is_held(record):
                made = self._read(record)
                rows += made.rows
                self.left_out += made.left_out
                self.counted += made.counted
        return rows

    def _source(self, epoch: int) -> Any:
        from datasets import load_dataset

        files = [str(path) for path in self._files]
        random.Random(f"{self._seed}/files/{epoch}").shuffle(files)
        return load_dataset(self._kind, data_files=files, split="train", streaming=True)

    def _is_held(self, record: Record) -> bool:
        # What several records of one prompt share, so that it is never on both sides.
        chat = chat_of(record, "")
        told = record.get("prompt") or (record if isinstance(chat, str) else asked(chat))
        said = json.dumps(told, sort_keys=True, default=str).encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=7).digest(), "big") < self._share * (1 << 56)


def _digest(path: Path) -> tuple[int, str]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = stream.read(EDGE)
        stream.seek(max(0, size - EDGE))
        return size, hashlib.sha256(first + stream.read(EDGE)).hexdigest()
