"""A plain transformers folder: what `assistant_model=` takes, and what vLLM's draft_model method and SGLang's STANDALONE read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from draftsmith.recipes import Recipe
from draftsmith.recipes.files import whole_folder
from draftsmith.specdec.drafters.trimmed import FILE as IDS
from draftsmith.specdec.places import quiet
from draftsmith.train.export import cost, int8
from draftsmith.train.export.card import card
from draftsmith.train.export.conditions import Fit, fit
from draftsmith.train.export.proof import free_place, proved, safe
from draftsmith.train.export.prove import fingerprint, tied


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
    eight = int8.asked(recipe, name)
    place = free_place(recipe, force, f"{name}-int8" if eight else name)
    pair = fit(recipe)
    with whole_folder(place, bytes_of(pair) * (2 if eight else 1)) as beside:
        draft = int8.quantised(pair.draft, beside, name, pair.target.dtype) if eight else pair.draft
        with quiet():
            draft.save_pretrained(beside)
        pair.tokenizer.save_pretrained(beside)
        for one in ("drafter.json", IDS):  # a head trimmed to some ids is written whole; our decoder alone reads which
            if (pair.source / one).is_file():
                shutil.copyfile(pair.source / one, beside / one)
        if pair.exit is not None:
            (beside / "drafter.json").write_text(json.dumps(pair.exit.about) + "\n", encoding="utf-8")
        served = finish(beside, place, pair) if finish else Served(ASSISTANT, [])
        proof = proved("prove", beside, recipe.target.model, {"fingerprint": fingerprint(draft), "tied": tied(draft)})
        answers = f"{proof['equal']} of {proof['compared']} greedy answers"
        said = (
            f"reloaded in a fresh process, logits equal bit for bit; {answers} of {proof['tokens']} tokens equal the target's own with this draft "
            "as `assistant_model`"
        )
        notes = [*pair.notes, *served.notes]
        lost = cost.told(recipe, pair.tokenizer, pair.draft, int8.plain(draft, pair.draft)) if eight else ""
        (beside / "README.md").write_text(card(recipe, said, served.use, notes, layer=pair.layer, lost=lost), encoding="utf-8")
        safe(beside)
    print(
        f"exported {place}: reloaded in a fresh process, logits equal bit for bit; as transformers' assistant_model, {answers} equal the target's own"
    )
    for note in filter(None, (lost, *notes)):
        print(note)
    if finish:
        print(f"use it: {served.use}")
    return place


def bytes_of(pair: Fit) -> int:
    return sum(one.numel() * one.element_size() for one in pair.draft.parameters())
