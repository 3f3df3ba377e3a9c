"""A run whose draft is exits, on disk: the same loop and checkpoints, heads alone in them, and what is exported is what was trained."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.distill import DistillExits
from draftsmith.distill.batch import Example
from draftsmith.distill.exit_memory import predict_exits
from draftsmith.distill.making.cut import cut
from draftsmith.recipes import load_recipe, runs
from draftsmith.specdec import load, load_drafter
from draftsmith.train import exits
from draftsmith.train.data.plan import Rows
from draftsmith.train.export import exits_folder, proof, prove, prove_gguf
from draftsmith.train.export.card import card
from draftsmith.train.export.conditions import fit
from runs import inside, write_run
from tiny import tiny, tiny_folder

DRAFT = {
    "kind": "exits",
    "exits": [
        {"layer": 1, "head": "adapter", "rank": 8, "weight": 2},
        {"layer": 2, "head": "block", "rank": 0},
        {"layer": 3, "head": "lora", "rank": 8, "lora": {"rank": 2, "alpha": 4}},
    ],
    "warm_start_tokens": 200,
}
TRAIN = {
    "epochs": 2,
    "batch_size": 3,
    "learning_rate": 1e-3,
    "evaluate_every": 4,
    "save_every": 4,
    "threads": 1,
    "support": "answers",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exits")
    done = inside("train", write_run(place, 16, draft=DRAFT, train=TRAIN))
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place


def heads(run: Path) -> dict[str, torch.Tensor]:
    return load_file(runs.steps(run)[-1] / "draft" / "heads.safetensors")


def test_a_run_of_exits_says_what_each_is_worth_and_keeps_only_heads(finished: Path) -> None:
    run, told = finished / "runs" / "small", (finished / "stdout").read_text()
    for words in (
        "memory: the heads add 0.0",
        "MB of tensors expected",
        "of its exits: after layer 1 acceptance",
        "after layer 3",
    ):
        assert words in told, words
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["held_out"] for line in lines if "held_out" in line]
    best = json.loads((run / "best.json").read_text())
    assert best["held_out"]["block_length"] == max(one["block_length"] for one in held_out)
    parts = held_out[-1]["parts"]
    shares = {"1": 0.5, "2": 0.25, "3": 0.25}
    assert held_out[-1]["acceptance"] == pytest.approx(sum(shares[name] * parts[name]["acceptance"] for name in shares))
    target = load(finished / "target")
    size = sum(one.numel() for one in target.model.parameters())
    assert sum(one.numel() for one in load_file(runs.steps(run)[-1] / "trainer" / "model.safetensors").values()) < size / 2
    for which in runs.NAMED:
        folder = runs.find_draft(run, which)
        about = json.loads((folder / "drafter.json").read_text())
        assert about["kind"] == "exits"
        assert about["revision"].startswith("sha256:")
        assert set(about["settings"]["exits"][0]["held_out"]) == {"acceptance", "agreement", "block_length", "greedy_block_length"}
        for layer in (1, 2, 3):
            assert load_drafter(f"{folder}:{layer}", *target).layer == layer  # type: ignore[attr-defined]
    fits = json.loads((run / "start" / "warm" / "fit.json").read_text())
    assert fits["1"]["after"] > fits["1"]["before"]
    assert "exits of the target itself after layers 1 (adapter, map of rank 8), 2 (block, full map), 3 (lora, lora of rank 2" in (
        (run / "environment.json").read_text()
    )


def test_what_is_told_of_a_step_is_the_largest_micro_batch(tmp_path: Path) -> None:
    train = {**TRAIN, "accumulate": 2}
    recipe = load_recipe(write_run(tmp_path, draft={"kind": "exits", "exits": [{"layer": 1, "rank": 8}]}, train=train))
    objective = DistillExits(tiny(), exits.asked(recipe.draft), support=torch.arange(20))  # type: ignore[arg-type]
    rows = Rows([Example(list(range(n)), ((2, n),)) for n in (5, 9, 7)], [], Counter(), Counter())
    settings = {"support": 20, "accumulate": 2}
    for pack, length, scored in ((0, 9, 3 * 7), (20, 20, 3 * 7 * 2)):
        packed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pack": pack})})
        found = exits.what_a_step_takes(packed, objective, rows, Accelerator(cpu=True))
        assert found == predict_exits(tiny().config, objective.exits.asked, 3, length, scored, objective.asked, **settings)  # type: ignore[arg-type]


def test_an_interrupted_run_of_exits_ends_with_the_same_bits(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    recipe, run = write_run(tmp_path / "copy", 16, draft=DRAFT, train=TRAIN), tmp_path / "copy" / "runs" / "small"
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace(str(finished), str(tmp_path / "copy")))
    wanted = heads(run)
    shutil.rmtree(runs.steps(run)[-1])
    again = inside("train", recipe)
    assert again.returncode == 0, again.stderr
    assert "going on from step" in again.stdout
    assert "warm start" not in again.stdout
    found = heads(run)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())


def test_each_exit_of_a_run_is_measured_by_its_layer(finished: Path) -> None:
    candidates = [{"drafter": f"run:{one}", "k": 2} for one in ("best", "warm:2", "best:3")] + [
        {"drafter": "ngram+run:best:1", "k": 2}
    ]
    recipe = write_run(finished, 16, draft=DRAFT, train=TRAIN)
    words = [f"eval.candidates={json.dumps(candidates)}", "eval.per_kind=1", "eval.max_new_tokens=8"]
    done = inside("eval", recipe, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads((finished / "runs" / "small" / "report.json").read_text())
    (part,) = report["parts"]
    assert list(part["candidates"]) == ["best", "warm:2", "best:3", "ngram+best:1"]
    assert all(one["all"]["equal"] == one["all"]["compared"] == 2 for one in part["candidates"].values())
    assert part["candidates"]["best:3"]["drafter"].endswith("draft:3")
    refused = inside("eval", recipe, 'eval.candidates=[{drafter: "run:best:4"}]')
    assert "it has exits after 1, 2, 3" in refused.stderr
    tiny_folder(finished / "other", seed=9)
    other = inside("eval", recipe, 'eval.candidates=[{drafter: "run:best:1"}]', f"target.model={finished / 'other'}")
    assert "Measure it with its own target" in other.stderr


def test_exports_of_exits_are_proved(finished: Path) -> None:
    recipe = write_run(finished, 16, draft=DRAFT, train=TRAIN)
    for words in (("export.exit=2",), ("--format", "exits")):
        done = inside("export", recipe, *words)
        assert done.returncode == 0, done.stderr
        assert "equal the target's own" in done.stdout
    place = finished / "runs" / "small" / "export"
    model: Any = AutoModelForCausalLM.from_pretrained(place / "transformers")
    target = load(finished / "target")
    drafter: Any = load_drafter(f"{place / 'exits'}:2", *target)
    ids = torch.tensor([[5, 9, 30, 4]])
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, drafter.model(input_ids=ids).logits, atol=1e-3, rtol=1e-3)
    assert len(model.model.layers) == 3
    assert json.loads((place / "transformers" / "drafter.json").read_text())["kind"] == "model"
    assert type(load_drafter(place / "transformers", *target)).__name__ == "ModelDrafter"
    assert "this is the exit after layer 2, as a model" in (place / "transformers" / "README.md").read_text()
    card = (place / "exits" / "README.md").read_text()
    assert "# Early exits for" in card
    assert "6 of 6 greedy answers" in card


def test_an_exit_is_a_draft_for_every_engine(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"prove": prove.prove, "prove_gguf": prove_gguf.prove}
    monkeypatch.setattr(proof, "in_a_fresh_process", lambda which, *words: json.loads(json.dumps(here[which](*words))))
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    recipe = write_run(finished, 16, draft=DRAFT, train=TRAIN)
    pair = fit(load_recipe(recipe, ["export.exit=2"]))
    assert (pair.layer, pair.draft.config.eos_token_id, pair.draft.config.num_hidden_layers) == (2, 2, 3)
    with monkeypatch.context() as broken:
        broken.setattr(exits_folder, "stand_alone", lambda target, layer, head: cut(target, list(range(layer)), tied=False))
        with pytest.raises(RuntimeError, match=r"the exit after layer 2 as a model gives logits up to .* nothing was exported"):
            fit(load_recipe(recipe, ["export.exit=2"]))
    place, target = finished / "runs" / "small" / "export", load(finished / "target")
    reads_gguf = Version(transformers.__version__) >= Version("5.10")
    for format in ("gguf", "vllm", "sglang", "openvino"):
        words = ("export.exit=2", "export.split=gpt-2", "export.quantization=f32", "--format", format)
        done = inside("export", recipe, *words, "--force")
        assert done.returncode == 0, done.stderr
        folder = place / ("gguf-f32" if format == "gguf" else format)
        assert "this is the exit after layer 2, as a model" in (folder / "README.md").read_text()
        if format == "gguf" and not reads_gguf:
            with pytest.raises(ValueError, match=r"Take a newer transformers \(5\.10 reads it\)"):
                load_drafter(folder / "draft.gguf", *target)
            continue
        drafter: Any = load_drafter(folder / "draft.gguf" if format == "gguf" else folder, *target)
        assert drafter.model.state_dict().keys() == pair.draft.state_dict().keys()
        for name, value in pair.draft.state_dict().items():
            assert torch.equal(drafter.model.state_dict()[name], value), (format, name)
    # What the proof of the .gguf was held against is gone.
    assert sorted(one.name for one in (place / "gguf-f32").iterdir()) == ["README.md", "draft.gguf", "serve.sh"]


def test_the_card_of_an_exit_has_the_figures_of_that_exit(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    recipe = load_recipe(write_run(tmp_path / "copy", 16, draft=DRAFT, train=TRAIN))
    best = runs.find_draft(recipe.folder, "best")
    default = json.loads((best / "drafter.json").read_text())["settings"]["default"]
    other = next(one for one in (1, 2, 3) if one != default)
    (recipe.folder / "report.md").write_text("# Report\n\nFIGURES\n")

    def has(measured: str, layer: int | None) -> bool:
        (recipe.folder / "report.json").write_text(
            json.dumps({"parts": [{"candidates": {"one": {"drafter": f"{best}{measured}"}}}]})
        )
        return "FIGURES" in card(recipe, "", "", [], layer=layer)

    assert has("", None)
    assert has("", default)
    assert not has("", other)
    assert has(f":{other}", None)
    assert has(f":{other}", other)
    assert not has(f":{other}", default)
    held_out = json.loads((best.parent / "state.json").read_text())["held_out"]["parts"][str(other)]
    assert f"acceptance sum min(p, q) {held_out['acceptance']:.3f}" in card(recipe, "", "", [], layer=other)


def test_what_makes_no_sense_with_exits_is_refused_by_name(tmp_path: Path) -> None:
    recipe = write_run(tmp_path, draft=DRAFT)
    for words, message in {
        "train.teacher=states": "needs train.teacher live, found states",
        "train.teacher=stored": "needs train.teacher live, found stored",
        "train.on_policy={share: 0.5}": "on_policy is not offered for a draft of kind exits",
        "draft.exits=[{layer: 1}, {layer: 1, head: block}]": "each at most once",
        "draft.exits=[]": "at least 1 item",
        "draft.exits=[{layer: 1, head: adaptor}]": "draft.exits.0.head",
        "draft.exits=[{layer: 1, lora: {rank: 2}}]": "lora settings belong to head lora",
        "draft.exits=[{layer: 0}]": "draft.exits.0.layer",
        "draft.exits=[{layers: 1}]": "did you mean layer?",
        "draft.bridge=auto": "draft.bridge: no such key",
        "export.exit=5": "export.exit names layer 5, and the draft's exits are after [1, 2, 3]",
        "draft={layers: [0]} export.format=exits": "belong to a draft of kind exits; this one is of kind layers",
        "eval.candidates=[{drafter: run:best:x}]": "run:best:6 the exit after layer 6",
    }.items():
        parts = words.split(" export.")
        with pytest.raises(ValueError) as error:  # noqa: PT011
            load_recipe(recipe, [parts[0], *(f"export.{one}" for one in parts[1:])])
        assert message in str(error.value), (words, str(error.value))
    done = inside("train", recipe, "draft.exits=[{layer: 3, head: block, rank: 8}]")
    assert "layers 1..2 for it" in done.stderr
    assert not (tmp_path / "runs" / "small" / "answers.jsonl").exists(), "before the target writes a word"
    layers = write_run(tmp_path, name="other")
    assert "take --format transformers" in inside("export", layers, "--format", "exits").stderr
