"""Where a run keeps things: the one description of a run folder that training writes and evaluation and export read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.recipes.checksums import damage

NAMED = ("untrained", "warm", "best", "latest")


def steps(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, the oldest first."""
    return sorted((one for one in folder.glob("step-*") if (one / "state.json").is_file()), key=number)


def named(folder: Path) -> list[Path]:
    """All that is called a checkpoint, the oldest first: the whole ones and those that lost files since."""
    return sorted((one for one in folder.glob("step-*") if one.is_dir()), key=number)


def judged(checkpoint: Path) -> bool:
    """Has it held-out figures? One that a signal asked for between two evaluations has none, and is chosen by nobody."""
    return state(checkpoint)["held_out"] is not None


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def state(checkpoint: Path) -> dict[str, Any]:
    """{step, held_out: {block_length, greedy_block_length, acceptance, agreement, loss, scored ...}, plan} of a checkpoint."""
    return _read(checkpoint / "state.json", f"remove {checkpoint.name}, or put it back from a copy")


def figure(checkpoint: Path, by: str) -> float:
    """The held-out figure that checkpoints are chosen by; ValueError where it was not measured, for another would choose otherwise."""
    held_out = state(checkpoint)["held_out"]
    if by not in held_out:
        raise ValueError(
            f"{checkpoint} has no held-out {by}, only {', '.join(held_out)}: it comes from a Draftsmith that chose by another figure. "
            "Train under another name (name=...), or remove the folder"
        )
    return float(held_out[by])


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest held-out figure (best.json says `by` which), or None before the first."""
    pointer = folder / "best.json"
    if not pointer.is_file():
        return None
    return folder / _read(pointer, "remove it, and draftsmith train RECIPE writes it again")["checkpoint"]


def _read(path: Path, instead: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {instead}") from error


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last one without its end, which a kill or a full disk can leave, is none."""
    path = folder / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def passed_over(folder: Path) -> str:
    """What a report says of the steps that `train.skip_bad_steps` passed over; "" where there were none."""
    steps = [line["step"] for line in metrics(folder) if "skipped" in line]
    return (
        f"{len(steps)} of the steps moved nothing, for loss or gradient was not finite: {', '.join(map(str, steps))}"
        if steps
        else ""
    )


def find_draft(folder: Path, which: str) -> Path:
    """The draft that `untrained`, `warm`, `best` or `latest` names in a run: a transformers folder with drafter.json. ValueError where
    the disk spoiled it since, for what is exported or measured then would be another draft."""
    if which not in NAMED:
        raise ValueError(f"run:{which} is not one of {', '.join('run:' + name for name in NAMED)}")
    if which in ("untrained", "warm"):
        place: Path | None = folder / "start" / which
    else:
        checkpoint = best(folder) if which == "best" else next(iter(reversed(steps(folder))), None)
        place = checkpoint / "draft" if checkpoint else None
        if checkpoint is not None and checkpoint.is_dir() and (wrong := damage(checkpoint, "draft/")) is not None:
            raise ValueError(
                f"{checkpoint}, which is run:{which}, is damaged: {wrong}. Put that back from a copy; or remove {checkpoint.name}, and draftsmith "
                "train RECIPE finds the best of the checkpoints that are left, going on from the last of them"
            )
    if place is None or not place.is_dir():
        raise FileNotFoundError(f"{folder} holds no {which} draft yet; train it first: draftsmith train RECIPE")
    return place
