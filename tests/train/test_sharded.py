"""A target in parts says what the whole one says, in a share of the memory, whoever has more to ask of it; where it cannot, that is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from draftsmith.recipes import load_recipe, runs
from draftsmith.specdec.models import blocks
from draftsmith.train import run, sharded
from ranks import SEVERAL, Ranks
from runs import told, write_run
from tiny import FAMILIES, tiny

WORDS = ["train.epochs=1", "train.batch_size=3", "train.save_every=2", "train.evaluate_every=2"]


@pytest.fixture(scope="module")
def recipe(several: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has its answers, to seven rows: of a step of six and one, the second process has no row in the last."""
    place = tmp_path_factory.mktemp("sharded")
    found = write_run(place, 9)
    ended = several.run("single", "train", place / "said", found, *WORDS, "train.batch_size=6")
    assert not any(ended.codes), "\n".join(ended.stderr)
    return found


def trained(several: Ranks, recipe: Path, name: str, *words: str, engine: str = "ddp", processes: int = 2) -> Path:
    """The folder of a run of that name; it has its answers."""
    whole = recipe.parent / "runs"
    if not (whole / name).exists():
        (whole / name).mkdir()
        for one in ("answers.jsonl", "answers.jsonl.json"):
            shutil.copy(whole / "small" / one, whole / name / one)
    place = recipe.parent / f"{name}-said"
    ended = several.run(engine, "train", place, recipe, *WORDS, *words, f"name={name}", processes=processes)
    assert not any(ended.codes), "\n".join(ended.stderr)
    return whole / name


def draft(folder: Path) -> dict[str, bytes]:
    """The files of the last draft."""
    return {one.name: one.read_bytes() for one in (runs.steps(folder)[-1] / "draft").iterdir()}


CASES = {
    "live": [],
    "states": ["train.teacher=states"],
    "stored": ["train.teacher=stored", "train.top_k=4"],
    "auto": ["draft={kind: layers, layers: 'auto:2', warm_start_tokens: 200}"],
    "a gap, packed": ["draft={kind: layers, layers: [0, 2], warm_start_tokens: 200}", "data.pack=200", "data.max_length=200"],
    "on policy": ["train.teacher=states", "train.on_policy={share: 0.5, refresh_every: 2, rows: 6, max_new_tokens: 8}", "train.epochs=2"],
    "a checkpoint": ["draft={kind: checkpoint, model: PLACE/target}"],
    "exits": ["draft={kind: exits, exits: [{layer: 1, rank: 4}, {layer: 2, rank: full}], warm_start_tokens: 200}"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_makes_the_same_draft_with_a_target_in_parts(case: str, several: Ranks, recipe: Path) -> None:
    words = [one.replace("PLACE", str(recipe.parent)) for one in CASES[case]]
    name = case.replace(" ", "-").replace(",", "")
    whole, parts = (trained(several, recipe, f"{name}-{shard}", *words, f"target.shard={shard}") for shard in ("false", "true"))
    assert told(parts) == told(whole)
    assert draft(parts) == draft(whole)
