"""Each kind of draft through a whole run: it learns, its checkpoints go on where they were, and its folder is a draft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from draftsmith.recipes import runs
from draftsmith.specdec import load, load_drafter
from runs import inside, write_run
from tiny import tiny_folder

DRAFTS = {
    "auto": {"layers": "auto:2", "warm_start_tokens": 200},
    "width": {"kind": "width", "layers": "ends:2", "intermediate": 24, "heads": 2, "warm_start_tokens": 200},
    "hidden": {"kind": "width", "hidden": 16},
    "tied": {"kind": "checkpoint"},
    "adapters": {"kind": "checkpoint", "lora": {"rank": 4, "alpha": 8}},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_run_of_each_kind(name: str, tmp_path: Path) -> None:
    draft = dict(DRAFTS[name])
    if draft.get("kind") == "checkpoint":
        draft["model"] = tiny_folder(tmp_path / "checkpoint", seed=4, tie_word_embeddings=name == "tied")
    recipe = write_run(tmp_path, draft=draft)
    done = inside("train", recipe)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "small"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    best = runs.best(run)
    assert best is not None
    target = load(tmp_path / "target")
    load_drafter(best / "draft", target.model, target.tokenizer)
    last = runs.steps(run)[-1]
    wanted = load_file(last / "draft" / "model.safetensors")
    if name == "auto":
        assert json.loads((run / "start" / "layers.json").read_text())["tried"]
        assert "candidates of 2 of 3 layers" in done.stdout
    if name == "adapters":
        state = load_file(last / "trainer" / "model.safetensors")
        assert state
        assert all(".lora_" in key for key in state)
    shutil.rmtree(last)
    again = inside("train", recipe)
    assert again.returncode == 0, again.stderr
    assert "going on from step" in again.stdout
    assert "candidates" not in again.stdout  # chosen once
    found = load_file(last / "draft" / "model.safetensors")
    assert all((found[key] == one).all() for key, one in wanted.items())
