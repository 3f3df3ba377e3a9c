"""A plain transformers folder: what `assistant_model=` takes, and what vLLM's draft_model method and SGLang's STANDALONE read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.recipes import Recipe
from draftsmith.recipes.files import whole_folder
from draftsmith.specdec.drafters.trimmed import FILE as IDS
from draftsmith.specdec.places import quiet
from draftsmith.train.export.card import card
from draftsmith.train.export.conditions import Fit, fit, safe
from draftsmith.train.export.prove import fingerprint, tied
from draftsmith.train.run import same_run


def export(recipe: Recipe, force: bool = False) -> Path:
    """Write the run's best draft to runs/NAME/export/transformers, proved by a fresh process before it gets that name."""
    return write_folder(recipe, force, "transformers")


class Served(NamedTuple):
    """What an engine adds to the folder: how it is used, and what else to say."""

    use: str
    notes: list[str]


ASSISTANT = "target.generate(**inputs, assistant_model=draft)          # transformers, batch 1"


def write_folder(recipe: Recipe, force: bool, name: str, finish: Callable[[Path, Path, Fit], Served] | None = None) -> Path:
    """The folder runs/NAME/export/`name`; `finish` (folder being written, its name to be, the pair) puts an engine's own files into it."""
    place = free_place(recipe, force, name)
    pair = fit(recipe)
    with whole_folder(place, bytes_of(pair)) as beside:
        with quiet():
            pair.draft.save_pretrained(beside)
        pair.tokenizer.save_pretrained(beside)
        for one in ("drafter.json", IDS):  # a head trimmed to some ids is written whole; our decoder alone reads which
            if (pair.source / one).is_file():
                shutil.copyfile(pair.source / one, beside / one)
        served = finish(beside, place, pair) if finish else Served(ASSISTANT, [])
        proof = _prove(beside, recipe.target.model, {"fingerprint": fingerprint(pair.draft), "tied": tied(pair.draft)})
        answers = f"{proof['equal']} of {proof['compared']} greedy answers"
        said = (
            f"reloaded in a fresh process, logits equal bit for bit; {answers} of {proof['tokens']} tokens equal the target's own with this draft "
            "as `assistant_model`"
        )
        notes = [*pair.notes, *served.notes]
        (beside / "README.md").write_text(card(recipe, said, served.use, notes), encoding="utf-8")
        safe(beside)
    print(
        f"exported {place}: reloaded in a fresh process, logits equal bit for bit; as transformers' assistant_model, {answers} equal the target's own"
    )
    for note in notes:
        print(note)
    if finish:
        print(f"use it: {served.use}")
    return place


def free_place(recipe: Recipe, force: bool, name: str) -> Path:
    same_run(recipe)
    place = recipe.folder / "export" / name
    if place.exists() and not force:
        raise FileExistsError(f"{place} exists; --force replaces it")
    return place


def bytes_of(pair: Fit) -> int:
    return sum(one.numel() * one.element_size() for one in pair.draft.parameters())


def in_a_fresh_process(module: str, *words: str) -> dict[str, Any]:
    """What `python -m draftsmith.train.export.MODULE` prints as its last line, in a process that knows nothing of this one."""
    done = subprocess.run([sys.executable, "-m", f"draftsmith.train.export.{module}", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the export does not load in a fresh process; nothing was exported:\n{done.stderr.strip()[-2000:]}")
    proof: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return proof


def _prove(folder: Path, target: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """RuntimeError where a fresh process finds something else in the folder than what was to be written."""
    proof = in_a_fresh_process("prove", str(folder), target)
    if different := [f"{what} {proof[what]} for {value}" for what, value in wanted.items() if proof[what] != value]:
        raise RuntimeError(
            f"a fresh process finds another draft in the folder than was written ({', '.join(different)}); nothing was exported"
        )
    if proof["equal"] != proof["compared"]:
        raise RuntimeError(
            f"with this draft as assistant_model only {proof['equal']} of {proof['compared']} greedy answers equal the target's own"
        )
    return proof
