"""Checkpoints: `step-N/` holds the draft as a transformers folder and the trainer's state; it is whole, or it is not there, and
what became of it on the disk is seen by its SHA256SUMS.

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
from accelerate.utils import broadcast_object_list

from draftsmith.distill import Objective
from draftsmith.recipes import runs
from draftsmith.recipes.checksums import damage, write_sums
from draftsmith.recipes.files import remove_whole, whole_folder, write_whole
from draftsmith.train.engines import gathered, trainer


def save(
    folder: Path,
    step: int,
    objective: Objective,
    accelerator: Accelerator,
    held_out: dict[str, Any] | None,
    plan: dict[str, Any],
    keep: int,
    needs: int,
    by: str = "block_length",
) -> Path:
    """Write `folder`/step-N beside its name and rename it; then point `best` (highest held-out `by`) and drop all but the last `keep` and it.

    One without `held_out` figures, which was asked for between two evaluations, is never the best, and is dropped with the next: a
    run that was interrupted leaves what an undisturbed one leaves.
    `plan` says what the steps are of (rows, how many a step); a run that goes on must have the same.
    """
    place = folder / f"step-{step}"
    main = accelerator.is_main_process
    with whole_folder(place, needs) if main else contextlib.nullcontext(place.with_name(f".{place.name}.writing")) as beside:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(beside / "trainer"))
        weights = gathered(objective.trainable, accelerator)
        save: Any = objective.save  # one that can be sharded takes its whole weights, too
        if main:
            with torch.random.fork_rng():  # building the draft draws random weights; the run must not see that
                save(beside / "draft") if weights is None else save(beside / "draft", weights)
            about = {"step": step, "held_out": held_out, "plan": plan, "trainer": trainer(accelerator)}
            (beside / "state.json").write_text(json.dumps(about, indent=1) + "\n")
        accelerator.wait_for_everyone()  # what the others write is there before it is counted
        if main:
            write_sums(beside)
    accelerator.wait_for_everyone()
    if main:
        _tidy(folder, keep, by)
    return place


def sound(folder: Path, on_damage: str, accelerator: Accelerator) -> None:
    """ValueError, on all processes, where the last checkpoint is damaged; with `on_damage` "previous" it and any damaged one before it
    are set aside as damaged-step-N, so that the run goes on from the last that is whole."""
    told = [_mend(folder, on_damage) if accelerator.is_main_process else None]
    if (wrong := broadcast_object_list(told)[0]) is not None:
        raise ValueError(wrong)


def _mend(folder: Path, on_damage: str) -> str | None:
    wrong: dict[Path, str] = {}
    for place in reversed(runs.named(folder)):
        if (told := damage(place)) is None:
            break
        wrong[place] = told
        if on_damage == "stop":
            return f"{place} is damaged: {told}. train.on_damage=previous goes on from the checkpoint before it, if that is whole"
    else:
        if wrong:
            every = "; ".join(f"{place.name}: {told}" for place, told in wrong.items())
            return f"{folder} has no checkpoint that is whole ({every}). Remove them to begin anew, or name this run otherwise (name=...)"
    for place, told in wrong.items():
        aside = place.with_name(f"damaged-{place.name}")
        shutil.rmtree(aside, ignore_errors=True)
        place.rename(aside)
        print(f"{place} is damaged: {told}; it is kept as {aside.name}, and the run goes on from the one before it")
    return None


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
    if runs.judged(done[-1]):
        runs.figure(done[-1], by)  # one that cannot be compared is refused before anything is loaded
    accelerator.load_state(str(done[-1] / "trainer"))
    if accelerator.is_main_process:
        _tidy(folder, keep, by)  # a kill can come between a checkpoint's rename and this
    return runs.number(done[-1])


def _tidy(folder: Path, keep: int, by: str) -> None:
    for left in folder.glob(".step-*"):  # what a kill left of one in the making, or of one that was being removed
        shutil.rmtree(left)
    every = runs.steps(folder)
    done = [one for one in every if runs.judged(one)]
    best = max(done, key=lambda one: (runs.figure(one, by), -runs.number(one)), default=None)
    if best is not None:
        write_whole(folder / "best.json", json.dumps({"checkpoint": best.name, "by": by, **runs.state(best)}, indent=1) + "\n")
    for old in every[:-1]:
        if old not in done[-keep:] and old != best:
            remove_whole(old)
