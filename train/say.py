"""What a run says to its user where it begins and where it ends; what it says in between is a line of progress."""

from __future__ import annotations

import json

from accelerate import Accelerator

from draftsmith.distill import DistillExits
from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.files import write_whole
from draftsmith.train import exits
from draftsmith.train.choice import Choice
from draftsmith.train.data.plan import Order
from draftsmith.train.record import banner, environment, reach
from draftsmith.train.sharded import held
from draftsmith.train.start import what_a_step_takes
from draftsmith.train.taught import Seen, Taught


def begins(recipe: Recipe, seen: Seen, taught: Taught, done: int, name: str, accelerator: Accelerator) -> None:
    """Rows, steps, processes and the memory expected; environment.json. `done` steps are behind it, `name` is the target's revision."""
    folder, objective = recipe.folder, taught.objective
    about = environment(accelerator, name, recipe, seen.rows, taught.draft)
    write_whole(folder / "environment.json", json.dumps(about, indent=1) + "\n")
    banner(seen.rows, seen.plan, done, accelerator, folder, recipe.train.processes)
    told = isinstance(objective, DistillExits)
    if told:
        print(exits.memory(objective))
    elif far := reach(taught.draft, seen.rows):
        print(far)
    expected = (exits.what_a_step_takes if told else what_a_step_takes)(recipe, objective, seen.rows, accelerator)
    print(expected if isinstance(expected, str) else f"memory: {expected.total / 1e6:.0f} MB of tensors expected")
    if recipe.target.shard:
        mine, every = held(taught.draft.target)
        print(
            f"the target is in parts: {mine / 1e6:.0f} of its {every / 1e6:.0f} MB are on each of {accelerator.num_processes} processes"
        )
    if taught.said:
        print(f"the draft says {taught.said}")


def came(recipe: Recipe, plan: Order, choice: Choice) -> None:
    """The best draft, why it ended where it did, and what was passed over."""
    folder = recipe.folder
    if told := runs.passed_over(folder):
        print(told)
    if choice.over:
        print(f"stopped at {runs.steps(folder)[-1].name} of {plan.steps}: {choice.why()}")
    if (best := runs.best(folder)) is not None:
        figures = runs.state(best)["held_out"]
        print(
            f"best draft: {best / 'draft'}, held-out acceptance {figures['acceptance']:.3f}, "
            f"{choice.by} {figures[choice.by]:.3f} tokens a call (k = {recipe.train.k})"
        )
        if "parts" in figures:
            print(f"of its exits: {exits.figures(figures)}")
