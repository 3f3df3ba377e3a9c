"""Checkpoints: `step-N/` holds the draft as a transformers folder and the trainer's state; it is whole, or it is not there."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from accelerate import Accelerator

from draftsmith.distill import Objective
from draftsmith.recipes import runs
from draftsmith.recipes.files import whole_folder, write_whole


def save(
    folder: Path, step: int, objective: Objective, accelerator: Accelerator, held_out: dict[str, float], keep: int, needs: int
) -> Path:
    """Write `folder`/step-N beside its name and rename it; then point `best` and drop all but the last `keep` and the best."""
    place = folder / f"step-{step}"
    main = accelerator.is_main_process
    with whole_folder(place, needs) if main else contextlib.nullcontext(place.with_name(f".{place.name}.writing")) as beside:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(beside / "trainer"))
        if main:
            objective.save(beside / "draft")
            (beside / "state.json").write_text(json.dumps({"step": step, "held_out": held_out}, indent=1) + "\n")
        accelerator.wait_for_everyone()
    accelerator.wait_for_everyone()
    if main:
        best = max(runs.steps(folder), key=lambda one: (runs.state(one)["held_out"]["acceptance"], runs.number(one)))
        write_whole(folder / "best.json", json.dumps({"checkpoint": best.name, **runs.state(best)}, indent=1) + "\n")
        for old in runs.steps(folder)[:-keep]:
            if old != best:
                shutil.rmtree(old)
    return place


def resume(folder: Path, accelerator: Accelerator) -> int:
    """Load the last whole checkpoint -> how many steps are done; 0 where there is none."""
    done = runs.steps(folder)
    if not done:
        return 0
    accelerator.load_state(str(done[-1] / "trainer"))
    return runs.number(done[-1])
