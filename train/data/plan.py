"""Answers to rows of ids, and rows to steps: a plan that is a function of seed and step, so a resumed run sees what it would have."""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from draftsmith.distill import Batch, collate
from draftsmith.distill.batch import Example, Row, example
from draftsmith.train.data.all_rows import all_made
from draftsmith.train.data.chats import Form, asked, chats_of

WINDOW = 512  # rows that are packed together: a wider one wastes little less and costs its square


class Rows(NamedTuple):
    """Rows to learn from, rows held out (whole prompts, never split), what was left out and why, and what the report counts."""

    train: list[Example]
    held_out: list[Example]
    left_out: Counter[str]
    counted: Counter[str]


def to_rows(
    answers: list[dict[str, Any]], tokenizer: Any, max_length: int, held_out: float, seed: int, most: int = 0, form: Form | None = None,
    workers: int = 1, cache: Path | None = None,
) -> Rows:  # fmt: skip
    """Rows of `draftsmith prepare`'s answers (the very ids that the target said, EOS included where it came), or of `read_chats`.

    Rows come in an order shuffled by `seed`, so that the first of them are a fair sample; `most` keeps that many (0: all).
    `held_out` is a share of the prompts: all answers to one are on the same side.
    `form` says more than `max_length`, and is taken in its place.
    """
    chats = chats_of(answers)
    prompts = sorted({chat["key"] for chat in chats})
    drawn = set(random.Random(f"held out {seed}").sample(prompts, min(len(prompts), max(1, round(held_out * len(prompts))))))
    kept_back = {asked(chat) for chat in chats if chat["key"] in drawn}  # by its words: files may call one prompt by several names
    train: list[Example] = []
    held: list[Example] = []
    left_out: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for chat, made in zip(chats, all_made(chats, tokenizer, form or Form(max_length), workers, cache), strict=True):
        (held if asked(chat) in kept_back else train).extend(made.rows)
        left_out += made.left_out
        counted += made.counted
    if not train or not held:
        hint = f". Does the chat template of {tokenizer.name_or_path or 'the target'} know the assistant? It begins {str(tokenizer.chat_template)[:120]!r}"
        raise ValueError(
            f"{len(chats)} chats leave {len(train)} rows to train on and {len(held)} held out; left out: {dict(left_out)}"
            + ("" if train or held else hint)
        )
    random.Random(f"order {seed}").shuffle(train)
    if most:
        left_out["over data.rows"] = max(0, len(train) - most)
        train = train[:most]
    return Rows(train, held, left_out, counted)


class Order(Protocol):
    """What each step sees. `state` is a JSON object from which another process goes on faster; the steps hang on it in nothing."""

    size: int  # rows, or sequences of packed rows, a step on all processes together: not another one when their number changes
    steps: int

    @property
    def fingerprint(self) -> str: ...

    def step(self, number: int) -> Sequence[Example | list[Example]]:
        """What step `number`, counted from 0, sees: rows, or lists of rows that share a sequence."""

    def state(self) -> dict[str, Any]: ...

    def go_to(self, state: dict[str, Any]) -> None: ...


class Plan:
    """Which rows each step sees: shuffled anew each epoch, rows of like length together, every row once an epoch.

    With `pack`, rows share sequences of at most so many tokens: first fit, the longest first, within shuffled windows.
    """

    def __init__(self, rows: Sequence[Row], size: int, epochs: int, seed: int | str, pack: int = 0) -> None:
        self._rows = [example(row, f"row {number}") for number, row in enumerate(rows)]
        self.size, self._seed, self._pack = size, seed, pack
        if pack and (longest := max((len(row.ids) for row in self._rows), default=0)) > pack:
            raise ValueError(
                f"rows are packed into sequences of {pack} tokens, and one has {longest}; lower data.max_length to {pack}"
            )
        self._epoch = -1
        self._order: list[list[list[int]]] = []
        an_epoch = -(-len(rows) // size)
        self._ends = list(accumulate(len(self._shuffled(epoch)) if pack else an_epoch for epoch in range(epochs)))
        self.steps = self._ends[-1] if self._ends else 0

    @property
    def fingerprint(self) -> str:
        told = [self._rows, self.size, self._seed, self._pack]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def step(self, number: int) -> Sequence[Example | list[Example]]:
        """The rows of step `number`, counted from 0; packed ones are lists of rows, one a sequence."""
        epoch = bisect_right(self._ends, number)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        step = self._order[number - (self._ends[epoch - 1] if epoch else 0)]
        return [[self._rows[i] for i in one] if self._pack else self._rows[one[0]] for one in step]

    def state(self) -> dict[str, Any]:
        """Nothing: a step's number says it all."""
        return {}

    def go_to(self, state: dict[str, Any]) -> None:
        pass

    def _shuffled(self, epoch: int) -> list[list[list[int]]]:
        """The steps of an epoch, each a list of sequences, each a list of row numbers."""
        chance = random.Random(f"{self._seed}/{epoch}")
        order = list(range(len(self._rows)))
        chance.shuffle(order)
        steps = []
        if self._pack:
            packs = [pack for start in range(0, len(order), WINDOW) for pack in self._packed(order[start : start + WINDOW])]
            chance.shuffle(packs)
            return [packs[at : at + self.size] for at in range(0, len(packs), self.size)]
        window = self.size * 16  # sorting within a window saves padding and leaves the order random
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda i: len(self._rows[i].ids))
            steps += [[[i] for i in near[at : at + self.size]] for at in range(0, len(near), self.size)]
        chance.shuffle(steps)
        return steps

    def _packed(self, near: list[int]) -> list[list[int]]:
        packs: list[list[int]] = []
        room: list[int] = []
        for i in sorted(near, key=lambda i: -len(self._rows[i].ids)):
            length = len(self._rows[i].ids)
            at = next((at for at, left in enumerate(room) if left >= length), None)
            if at is None:
                packs.append([])
                room.append(self._pack)
                at = -1
            packs[at].append(i)
            room[at] -= length
        return packs


def micro_batches(rows: Sequence[Any], accumulate: int, rank: int, world: int) -> list[Batch]:
    """This process's share of a step's rows (or packs of rows) as `accumulate` batches; one that has none left scores nothing."""
    mine = rows[rank::world]
    size = -(-len(mine) // accumulate) or 1
    batches = [collate(mine[start : start + size]) for start in range(0, len(mine), size)]
    return batches + [collate([([0, 0], 2)])] * (accumulate - len(batches))
