"""Answers to rows of ids, and rows to steps: a plan that is a function of seed and step, so a resumed run sees what it would have."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from draftsmith.distill import Batch, collate
from draftsmith.specdec.models import chat_ids

Example = tuple[list[int], int]  # ids, and how many of them are prompt


class Rows(NamedTuple):
    """Rows to learn from, rows held out (whole prompts, never split), and what was left out and why."""

    train: list[Example]
    held_out: list[Example]
    left_out: dict[str, int]


def to_rows(answers: list[dict[str, Any]], tokenizer: Any, max_length: int, held_out: float, seed: int, most: int = 0) -> Rows:
    """Each answer after its rendered chat; the very ids that the target said, EOS included where it came.

    Rows come in an order shuffled by `seed`, so that the first of them are a fair sample; `most` keeps that many (0: all).
    """
    prompts = sorted({row["prompt"] for row in answers})
    kept_back = set(random.Random(f"held out {seed}").sample(prompts, max(1, round(held_out * len(prompts)))))
    train: list[Example] = []
    held: list[Example] = []
    left_out = {"longer than max_length": 0, "empty answer": 0}
    for row in answers:
        prompt = chat_ids(tokenizer, row["messages"])
        if not row["answer_ids"]:
            left_out["empty answer"] += 1
        elif len(prompt) + len(row["answer_ids"]) > max_length:
            left_out["longer than max_length"] += 1
        else:
            (held if row["prompt"] in kept_back else train).append((prompt + row["answer_ids"], len(prompt)))
    if not train or not held:
        raise ValueError(
            f"{len(answers)} answers leave {len(train)} rows to train on and {len(held)} held out; left out: {left_out}"
        )
    random.Random(f"order {seed}").shuffle(train)
    if most:
        left_out["over data.rows"] = max(0, len(train) - most)
        train = train[:most]
    return Rows(train, held, left_out)


class Plan:
    """Which rows each step sees: shuffled anew each epoch, rows of like length together, every row once an epoch."""

    def __init__(self, rows: list[Example], size: int, epochs: int, seed: int) -> None:
        self._rows, self._size, self._seed = rows, size, seed
        self.steps_an_epoch = -(-len(rows) // size)
        self.steps = self.steps_an_epoch * epochs
        self.fingerprint = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
        self._epoch, self._order = -1, [[0]]

    def step(self, number: int) -> list[Example]:
        """The rows of step `number`, counted from 0."""
        epoch, place = divmod(number, self.steps_an_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return [self._rows[i] for i in self._order[place]]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        chance = random.Random(f"{self._seed}/{epoch}")
        order = list(range(len(self._rows)))
        chance.shuffle(order)
        window = self._size * 16  # sorting within a window saves padding and leaves the order random
        steps = []
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda i: len(self._rows[i][0]))
            steps += [near[at : at + self._size] for at in range(0, len(near), self._size)]
        chance.shuffle(steps)
        return steps


def micro_batches(rows: Sequence[Example], accumulate: int, rank: int, world: int) -> list[Batch]:
    """This process's share of a step as `accumulate` batches; one that has no rows left is a row of which nothing is scored."""
    mine = list(rows[rank::world])
    size = -(-len(mine) // accumulate) or 1
    batches = [collate(mine[start : start + size]) for start in range(0, len(mine), size)]
    idle = collate([(rows[0][0][:2], len(rows[0][0][:2]))])
    return batches + [idle] * (accumulate - len(batches))
