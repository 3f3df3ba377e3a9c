"""Checkpoints: `step-N/` holds the draft as a transformers folder and the trainer's state; it is whole, or it is not there.

The trainer's state is what the accelerator was told of: weights, optimizer, random states, and what was registered with it, such as
the rows that the draft wrote and the patience left.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.distill import Objective
from draftsmith.recipes import runs
from draftsmith.recipes.files import whole_folder, write_whole


def save(
    folder: Path,
    step: int,
    objective: Objective,
    accelerator: Accelerator,
    held_out: dict[str, Any],
    plan: dict[str, Any],
    keep: int,
    needs: int,
    by: str = "block_length",
) -> Path:
    """Write `folder`/step-N beside its name and rename it; then point `best` (highest held-out `by`) and drop all but the last `keep` and it.

    `plan` says what the steps are of (rows, how many a step); a run that goes on must have the same.
    """
    place = folder / f"step-{step}"
    main = accelerator.is_main_process
    with whole_folder(place, needs) if main else contextlib.nullcontext(place.with_name(f".{place.name}.writing")) as beside:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(beside / "trainer"))
        if main:
            with torch.random.fork_rng():  # building the draft draws random weights; the run must not see that
                objective.save(beside / "draft")
            (beside / "state.json").write_text(json.dumps({"step": step, "held_out": held_out, "plan": plan}, indent=1) + "\n")
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    if main:
        _tidy(folder, keep, by)
    return place


def size(folder: Path) -> int:
    """Rows a step of the run in `folder`, which a run keeps whatever the number of processes; 0 before its first checkpoint."""
    done = runs.steps(folder)
    return int(runs.state(done[-1])["plan"]["size"]) if done else 0


def resume(folder: Path, accelerator: Accelerator, plan: dict[str, Any], keep: int, by: str = "block_length") -> int:
    """Load the last whole checkpoint -> how many steps are done; 0 where there is none. Another plan is refused."""
    done = runs.steps(folder)
    if not done:
        return 0
    before = runs.state(done[-1])["plan"]
    changed = [f"{name} was {before.get(name)}, is {value}" for name, value in plan.items() if before.get(name) != value]
    if changed:
        raise ValueError(
            f"{folder} cannot go on from {done[-1].name}: {'; '.join(changed)}. Set them back, or name this run otherwise (name=...)"
        )
    runs.figure(done[-1], by)  # one that cannot be compared is refused before anything is loaded
    accelerator.load_state(str(done[-1] / "trainer"))
    if accelerator.is_main_process:
        _tidy(folder, keep, by)  # a kill can come between a checkpoint's rename and this
    return runs.number(done[-1])


def _tidy(folder: Path, keep: int, by: str) -> None:
    best = max(runs.steps(folder), key=lambda one: (runs.figure(one, by), -runs.number(one)))
    write_whole(folder / "best.json", json.dumps({"checkpoint": best.name, "by": by, **runs.state(best)}, indent=1) + "\n")
    for old in runs.steps(folder)[:-keep]:
        if old != best:
            shutil.rmtree(old)
