"""What a run's steps see, and what is taught in them, by whom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from accelerate import Accelerator

from draftsmith.distill import Batch, DistillDraft, LiveTeacher
from draftsmith.distill.batch import in_batches
from draftsmith.distill.draft import Origin
from draftsmith.distill.making.vocabulary import Trim
from draftsmith.distill.packing import check_packing
from draftsmith.recipes import Recipe
from draftsmith.recipes.files import room_for
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.models import real_ids
from draftsmith.train import checkpoint, exits
from draftsmith.train.data.plan import Order, Rows
from draftsmith.train.rows import ordered
from draftsmith.train.start import bytes_on_disk, make, start, support, trim
from draftsmith.train.teachers import taught_by, with_states


class Seen(NamedTuple):
    """What the steps see: rows, their order, `size` of them a step on all processes together, as so many micro-batches on each."""

    rows: Rows
    plan: Order
    held_out: list[Batch]
    size: int
    accumulate: int


def seen_by(recipe: Recipe, target: Any, tokenizer: Any, name: str, accelerator: Accelerator) -> Seen:
    settings, data = recipe.train, recipe.data
    with accelerator.main_process_first():
        here = settings.batch_size * accelerator.num_processes
        size = (
            checkpoint.size(recipe.folder) or here * settings.accumulate
        )  # a run goes on with its own, on any number of processes
        rows, plan = ordered(recipe, target, tokenizer, name, size)
    if data.pack:
        check_packing(target, data.max_length)
    held_out = [*in_batches(rows.held_out, accelerator.device)]
    return Seen(rows, plan, held_out, size, -(-size // here))


class Taught(NamedTuple):
    """What is taught: the objective, its bare module, what the draft may say, the bytes of a checkpoint, how it starts, and what gives back
    the memory that only the start needs."""

    objective: Any
    draft: Any
    said: Trim | None
    needs: int
    begin: Callable[[], None]
    spare: Callable[[], None]


def taught_by_recipe(recipe: Recipe, target: Any, tokenizer: Any, name: str, seen: Seen, accelerator: Accelerator) -> Taught:
    settings, rows = recipe.train, seen.rows
    said = trim(recipe, rows, target, tokenizer)  # refused before the target is listened to
    only = support(rows, said) if settings.support == "answers" else None
    if isinstance(recipe.draft, ExitsDraft):
        heads = exits.objective_of(recipe, recipe.draft, target, tokenizer, name, only, said)
        needs = _with_room(recipe, exits.bytes_on_disk(heads))
        return Taught(
            heads, heads.exits, said, needs, lambda: exits.start(recipe, heads, rows, seen.held_out, accelerator), lambda: None
        )
    live = LiveTeacher(target, real_ids(target, tokenizer))
    states = with_states(recipe, live, rows, name, accelerator)
    # The first of them writes which layers were chosen, the others read it; or all ask a sharded target together.
    with nullcontext() if recipe.target.shard else accelerator.main_process_first():
        draft = make(recipe, target, states, tokenizer, rows, seen.held_out, accelerator).draft
    needs = _with_room(recipe, bytes_on_disk(draft))
    teacher = taught_by(recipe, live, states, rows, only, name, tokenizer, accelerator)
    objective = DistillDraft(
        draft, teacher, settings.loss, settings.chunk, only, Origin(recipe.target.model, name, tokenizer), settings.temperature,
        said.ids if said else None,
    )  # fmt: skip
    asked_again = settings.teacher == "live" or settings.on_policy is not None  # about rows that nobody has kept
    return Taught(
        objective, draft, said, needs, lambda: start(recipe, objective, states, rows, seen.held_out, accelerator),
        (lambda: None) if asked_again else live.let_go,
    )  # fmt: skip


def _with_room(recipe: Recipe, needs: int) -> int:
    """The bytes of a checkpoint, of which the run's folder has room for as many as are kept."""
    room_for(recipe.folder, (recipe.train.keep + 2) * needs, recipe.folder / "step-N")
    return needs
