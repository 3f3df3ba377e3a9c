"""The teacher that a recipe asks for: the live target, its final states on disk, or its likeliest ids on disk."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from draftsmith.distill import LiveTeacher
from draftsmith.distill.teacher import HiddenTeacher, Teacher
from draftsmith.recipes import Recipe
from draftsmith.train.data.plan import Rows
from draftsmith.train.data.prepare import served_revision, served_target
from draftsmith.train.sharded import in_step
from draftsmith.train.stored.listened import ListenedTeacher, ask_live
from draftsmith.train.stored.states import StoredTeacher
from draftsmith.train.stored.store import Ask, about_store, write_store


def with_states(recipe: Recipe, live: LiveTeacher, rows: Rows, revision: str, accelerator: Accelerator) -> StoredTeacher:
    """The target, with the final states of the held-out rows (and of all rows, if the recipe says so) kept in the run folder.

    Held-out figures and a warm start need whole laws and states, whatever teaches.
    """
    kept = rows.train + rows.held_out if recipe.train.teacher == "states" else rows.held_out
    return StoredTeacher(live, recipe.folder / "teacher", kept, revision, accelerator)


def taught_by(
    recipe: Recipe,
    live: LiveTeacher,
    states: HiddenTeacher,
    rows: Rows,
    support: Tensor | None,
    revision: str,
    tokenizer: Any,
    accelerator: Accelerator,
) -> Teacher:
    """Who teaches: `states`, or what was heard of the target, here or behind the recipe's server, about every row of the data."""
    train, server, folder = recipe.train, recipe.server, recipe.folder / "said"
    if train.teacher != "stored":
        return states
    ask: Ask
    if server is None:
        ask = ask_live(live, train.top_k, train.temperature, support)
    else:
        served, revision = served_target(server), served_revision(server.model, server.revision)
        served.check(tokenizer, train.top_k)

        def ask(rows: Any) -> Any:
            return served.listen(rows, train.top_k)

    name, dtype = (recipe.target.model, recipe.target.dtype) if server is None else (server.model, "as served")
    about = about_store(name, revision, tokenizer, dtype, states.rows, train.top_k, train.temperature, support)
    together = in_step(live.target, accelerator) if server is None else nullcontext()
    write_store(folder, rows.train, ask, about, accelerator, together=together)
    return ListenedTeacher(folder, about, rows.train, support, live=states)
