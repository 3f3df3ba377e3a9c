"""Exits for engines: one of them as a model of its own, for those that know drafts only; or the heads, for a decoder that has the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from draftsmith.distill.making.stand_alone import stand_alone
from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.files import whole_folder
from draftsmith.recipes.schema import ExitsDraft
from draftsmith.specdec.drafters.early_exit import exit_model
from draftsmith.specdec.drafters.exit_files import read_exit
from draftsmith.specdec.drafters.exit_heads import ExitHead
from draftsmith.specdec.models import load_model
from draftsmith.train.export import int8
from draftsmith.train.export.card import card
from draftsmith.train.export.proof import free_place, proved, safe

HEADS = 'generate(target, prompts, load_drafter("FOLDER", target))   # draftsmith.specdec; "FOLDER:6" for the exit after layer 6'
SAME = 1e-3  # of the largest logit: the map is multiplied into the head, which adds in another order


class OneExit(NamedTuple):
    """An exit as a model, its layer, and the drafter.json of a folder that holds it."""

    model: PreTrainedModel
    layer: int
    about: dict[str, Any]


def as_model(recipe: Recipe, source: Path) -> OneExit:
    """The exit that the recipe exports (or the one that the folder names best) as a model; RuntimeError where it says other things than the exit."""
    about = json.loads((source / "drafter.json").read_text(encoding="utf-8"))
    settings = about["settings"]
    layer = recipe.export.exit or settings["default"]
    target = load_model(recipe.target.model)
    _, head = read_exit(source, settings["exits"], layer, target)
    model = stand_alone(target, layer, head)
    _check(target, layer, head, model)
    kept = {name: value for name, value in settings.items() if name not in ("exits", "default")}
    return OneExit(model, layer, {**about, "kind": "model", "settings": kept})


@torch.no_grad()
def _check(target: PreTrainedModel, layer: int, head: ExitHead, model: PreTrainedModel) -> None:
    ids = torch.arange(3, 19).remainder(target.config.get_text_config().vocab_size)[None]
    wanted, found = (one.eval()(input_ids=ids, use_cache=False).logits for one in (exit_model(target, layer, head), model))
    apart = float((wanted - found).abs().max())
    if not apart <= SAME * float(wanted.abs().max()):
        raise RuntimeError(
            f"the exit after layer {layer} as a model gives logits up to {apart:.3g} away from the exit's; nothing was exported"
        )


def export(recipe: Recipe, force: bool = False) -> Path:
    """Write the run's best heads to runs/NAME/export/exits, proved beside the target by a fresh process before they get that name."""
    if not isinstance(recipe.draft, ExitsDraft):
        raise ValueError(f"format exits asked, and this run's draft is of kind {recipe.draft.kind}; take --format transformers")
    int8.asked(recipe, "exits")
    place = free_place(recipe, force, "exits")
    source = runs.find_draft(recipe.folder, "best")
    safe(source)
    with whole_folder(place, sum(one.stat().st_size for one in source.iterdir())) as beside:
        for one in source.iterdir():
            shutil.copyfile(one, beside / one.name)
        proof = proved("prove_exits", beside, recipe.target.model)
        said = (
            f"{proof['exits']} exits read in a fresh process beside the target; {proof['equal']} of {proof['compared']} greedy answers of "
            f"{proof['tokens']} tokens equal the target's own"
        )
        (beside / "README.md").write_text(card(recipe, said, HEADS, [], "draftsmith"), encoding="utf-8")
        safe(beside)
    print(f"exported {place}: {said}")
    return place
