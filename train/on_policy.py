"""On policy: with a chance set by the recipe, a step learns from rows that the draft wrote, as it was at the last refresh.

GKD's mix (2306.13649, algorithm 1; DistillSpec 2310.08461): the coin is tossed for a step as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftsmith.distill import DistillDraft, collate
from draftsmith.distill.batch import Row, example
from draftsmith.distill.rollout import speaking, write_rows
from draftsmith.recipes import Recipe
from draftsmith.specdec import Sampling
from draftsmith.specdec.models import eos_ids, real_ids
from draftsmith.train.data.plan import Order

Write = Callable[[list[list[int]], list[int]], list[Row]]  # prompts, a seed each -> rows


@dataclass(frozen=True)
class Schedule:
    """A step is on policy with chance `share`; every `refresh_every` steps there are `rows` new rows, on prompts drawn by `seed`."""

    share: float
    refresh_every: int
    rows: int
    seed: int


class Mixture:
    """The rows of each step: the plan's own (`off`), or `size` rows of a buffer that the draft wrote.

    Which of the two is a function of (seed, step). A step on policy takes nothing from the plan, whose order goes on behind it, so
    the data position is a function of the step, and the buffer is the only state: it is part of a checkpoint. The buffer is
    written before the first step on policy of each period of `refresh_every` steps, and read from its start, once over before
    a row comes again.
    """

    def __init__(
        self, off: Callable[[int], Sequence[Any]], steps: int, size: int, schedule: Schedule, prompts: list[list[int]], write: Write,
        ends: Iterable[int] = (), told: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> None:  # fmt: skip
        if schedule.rows < size:
            raise ValueError(
                f"on_policy.rows={schedule.rows} asked, and a step takes {size} rows: the same ones would come twice. Ask for at least {size}"
            )
        self._off, self._size, self._schedule, self._prompts, self._write = off, size, schedule, prompts, write
        self._ends, self._told = frozenset(ends), told
        coins = [random.Random(f"on policy {schedule.seed}/{step}").random() < schedule.share for step in range(steps)]
        self._before = [0, *itertools.accumulate(coins)]  # steps on policy before each step
        self._period, self._rows = -1, list[Row]()

    def takes(self, number: int) -> bool:
        """Is step `number`, counted from 0, on policy?"""
        return self._before[number + 1] > self._before[number]

    def step(self, number: int) -> Sequence[Any]:
        """The rows of step `number`; to be asked of every process in step, for all of them write."""
        if not self.takes(number):
            return self._off(number - self._before[number])
        period = number // self._schedule.refresh_every
        if self._period != period:
            self._refresh(period, number)
        start = (self._before[number] - self._before[period * self._schedule.refresh_every]) * self._size
        return [self._rows[at % len(self._rows)] for at in range(start, start + self._size)]

    def _refresh(self, period: int, number: int) -> None:
        wanted, seed = self._schedule.rows, f"{self._schedule.seed}/{period}"
        chance = random.Random(f"on policy prompts {seed}")
        again, rest = divmod(wanted, len(self._prompts))
        prompts = self._prompts * again + chance.sample(self._prompts, rest)
        chance.shuffle(prompts)
        seeds = [int(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=7).hexdigest(), 16) for place in range(wanted)]
        self._rows, self._period = self._write(prompts, seeds), period
        told = {"rows": wanted, "tokens": int(collate(self._rows).scored.sum())}
        told["finished"] = sum(row[0][-1] in self._ends for row in self._rows)  # the others were cut off
        self._told({"step": number + 1, "written_by_the_draft": told})

    def state_dict(self) -> dict[str, Any]:
        return {"period": self._period, "rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._period, self._rows = state["period"], state["rows"]


def writer(
    draft: Any, how: Sampling, max_new_tokens: int, eos: Iterable[int], vocab_size: int, batch_size: int, accelerator: Accelerator,
    ids: Tensor | None = None,
) -> Write:  # fmt: skip
    """The draft as it is whenever it is called; every process writes its share, and all get the same rows in the same order."""
    ends = frozenset(eos)
    rank, world = accelerator.process_index, accelerator.num_processes

    def write(prompts: list[list[int]], seeds: list[int]) -> list[Row]:
        places = range(rank, len(prompts), world)
        rows = write_rows(
            speaking(draft), [prompts[i] for i in places], how, max_new_tokens, [seeds[i] for i in places], ends, vocab_size, batch_size, ids
        )  # fmt: skip
        return [row for _, row in sorted(gather_object(list(zip(places, rows, strict=True))))]

    return write


def prompts_of(rows: Sequence[Row], longest: int) -> tuple[list[list[int]], int]:
    """The prompts that the draft may go on from, each once, and how many more were left out for being longer than `longest`."""
    prompts = sorted({tuple(row.ids[: row.spans[-1][0]]) for row in map(example, rows) if row.spans})
    kept = [list(prompt) for prompt in prompts if len(prompt) <= longest]
    if not kept:
        raise ValueError(
            f"on policy: the shortest prompt has {min(map(len, prompts))} tokens, and {longest} are left for one: lower "
            "on_policy.max_new_tokens or raise data.max_length"
        )
    return kept, len(prompts) - len(kept)


def mixed(
    recipe: Recipe, plan: Order, size: int, rows: Sequence[Row], objective: DistillDraft, target: Any, tokenizer: Any, accelerator: Accelerator,
    told: Callable[[dict[str, Any]], None],
) -> Mixture | None:  # fmt: skip
    """The plan mixed with rows that the draft writes on the prompts of `rows`, where the recipe asks for them."""
    own, data = recipe.train.on_policy, recipe.data
    if own is None:
        return None
    longest, ends = data.max_length - own.max_new_tokens, eos_ids(target, tokenizer)
    prompts, left_out = prompts_of(rows, longest)
    if accelerator.is_main_process:
        print(f"on policy: {len(prompts)} prompts, {left_out} of more than {longest} tokens left out")
    write = writer(
        objective.draft, Sampling(temperature=own.temperature), own.max_new_tokens, ends, real_ids(target, tokenizer), data.batch_size,
        accelerator, objective.asked.ids,
    )  # fmt: skip
    schedule = Schedule(own.share, own.refresh_every, own.rows, recipe.seed)
    return Mixture(plan.step, plan.steps, size, schedule, prompts, write, ends, told)
