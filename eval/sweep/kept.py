"""What a sweep has done so far, a line a prompt: a kill loses one prompt, and a change of what is asked is refused, not mixed in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.eval.measurement import Measurement, read_measurement
from draftsmith.eval.prediction.costs import Cost, cost_of
from draftsmith.eval.prediction.predicted import Answer
from draftsmith.eval.prompts import digest
from draftsmith.recipes import Prompt
from draftsmith.recipes.files import append_lines, appended, write_whole


class Done(NamedTuple):
    """A prompt's answers and all measurements on them."""

    answers: list[Answer]
    measured: list[Measurement]


class Started(NamedTuple):
    """What was clocked before the first prompt: seconds of a plain step, each setting's costs, how the models were prepared."""

    step: float
    costs: dict[str, Cost]
    prepared: str


def read_started(folder: Path, identity: dict[str, Any]) -> Started | None:
    """What an earlier call clocked; ValueError where it was asked something else."""
    path = folder / "started.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if changed := sorted(key for key in {*identity, *found["identity"]} if found["identity"].get(key) != identity.get(key)):
        was = ", ".join(f"{key} {found['identity'].get(key)!r}" for key in changed)
        raise ValueError(f"{folder} holds a sweep of another {was}; give another --out, or remove it to begin anew")
    return Started(found["step"], {name: cost_of(one) for name, one in found["costs"].items()}, found["prepared"])


def write_started(folder: Path, identity: dict[str, Any], started: Started) -> None:
    costs = {name: one._asdict() for name, one in started.costs.items()}
    about = {"schema": 1, "identity": identity, "step": started.step, "prepared": started.prepared, "costs": costs}
    (folder / "prompts.jsonl").unlink(missing_ok=True)
    write_whole(folder / "started.json", json.dumps(about, indent=1) + "\n")


def read_done(folder: Path, prompts: Sequence[Prompt]) -> dict[str, Done]:
    """What was measured already on these prompts, by id. ValueError where a prompt's text has changed since."""
    path = folder / "prompts.jsonl"
    wanted = {one.id: digest(one) for one in prompts}
    done: dict[str, Done] = {}
    for line in map(json.loads, appended(path)):
        if line["prompt"] not in wanted:
            continue
        if wanted[line["prompt"]] != line["digest"]:
            raise ValueError(f"prompt {line['prompt']} has changed since {path} was begun; give another --out, or remove {folder}")
        measured = [read_measurement(one) for one in line["measured"]]
        done[line["prompt"]] = Done([Answer(**one) for one in line["answers"]], measured)
    return done


def write_done(folder: Path, prompt: Prompt, done: Done) -> None:
    line = {
        "prompt": prompt.id, "digest": digest(prompt),
        "answers": [one._asdict() for one in done.answers], "measured": [asdict(one) for one in done.measured],
    }  # fmt: skip
    append_lines(folder / "prompts.jsonl", [json.dumps(line)])
