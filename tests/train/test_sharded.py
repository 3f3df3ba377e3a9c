"""A target in parts says what the whole one says, in a share of the memory, whoever has more to ask of it; where it cannot, that is said."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator

from draftsmith.recipes import load_recipe, runs
from draftsmith.specdec.models import blocks
from draftsmith.train import run, sharded
from draftsmith.train.engines import LIMITS
from ranks import Ranks
from runs import told, with_answers, write_run
from tiny import tiny, tiny_folder

WORDS = ["train.epochs=1", "train.batch_size=3", "train.save_every=2", "train.evaluate_every=2"]


@pytest.fixture(scope="module")
def recipe(several: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that has its answers, to seven rows: of a step of six and one, the second process has no row in the last."""
    place = tmp_path_factory.mktemp("sharded")
    found = write_run(place, 9)
    ended = several.run("single", "train", place / "said", found, *WORDS, "train.batch_size=6")
    assert not any(ended.codes), "\n".join(ended.stderr)
    return found


def trained(several: Ranks, recipe: Path, name: str, *words: str) -> Path:
    """The folder of a run of two processes."""
    folder = with_answers(recipe, name)
    ended = several.run("ddp", "train", recipe.parent / f"{name}-said", recipe, *WORDS, *words, f"name={name}")
    assert not any(ended.codes), "\n".join(ended.stderr)
    return folder


def draft(folder: Path) -> dict[str, bytes]:
    """The files of the last draft."""
    return {one.name: one.read_bytes() for one in (runs.steps(folder)[-1] / "draft").iterdir()}


CASES = {
    "live, auto": ["draft={kind: layers, layers: 'auto:2', warm_start_tokens: 200}"],
    "states, a gap, packed, on policy": [
        "train.teacher=states", "draft={kind: layers, layers: [0, 2], warm_start_tokens: 200}", "data.pack=200", "data.max_length=200",
        "train.on_policy={share: 0.5, refresh_every: 2, rows: 6, max_new_tokens: 8}", "train.epochs=2",
    ],
    "stored, a checkpoint": ["train.teacher=stored", "train.top_k=4", "draft={kind: checkpoint, model: PLACE/target}"],
    "exits": ["draft={kind: exits, exits: [{layer: 1, rank: 4}, {layer: 2, rank: 0}], warm_start_tokens: 200}"],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_makes_the_same_draft_with_a_target_in_parts(case: str, several: Ranks, recipe: Path) -> None:
    words = [one.replace("PLACE", str(recipe.parent)) for one in CASES[case]]
    name = case.replace(" ", "-").replace(",", "")
    whole, parts = (trained(several, recipe, f"{name}-{shard}", *words, f"target.shard={shard}") for shard in ("false", "true"))
    assert told(parts) == told(whole)
    assert draft(parts) == draft(whole)


def test_a_process_holds_its_parts_and_while_loading_one_block_more(several: Ranks, tmp_path: Path) -> None:
    ended = several.run("ddp", "parts", tmp_path, processes=3)
    assert not any(ended.codes), "\n".join(ended.stderr)
    model = tiny()
    each = [sum(one.numel() for one in block.parameters()) for block in blocks(model)[1]]
    rest = sum(one.numel() for one in model.parameters()) - sum(each)
    assert sum(held[0] for held, _ in ended.told) == sum(each), "all parts together are all blocks, each number once"
    for held, same in ended.told:
        parts, outer, _most, reading, ends, noted, kept = held
        assert parts < 0.4 * sum(each)
        assert outer == rest
        assert rest + max(each) <= reading <= parts + rest + max(each)
        assert ends == [2, 9], "the first process alone has read them"
        assert kept == [0, 0]
        assert not noted, "it would grow with each forward"
        assert {*same} == {"llama", "gemma2", "qwen3_moe", "gpt2", "llama again"}  # in bfloat16
        assert all(same.values()), same
    others = [held for held, _ in ended.told[1:]]
    assert all(most <= parts + outer + max(each) for parts, outer, most, *_ in others)


def test_where_one_is_killed_in_a_forward_of_the_target_the_other_ends_with_its_name(several: Ranks, recipe: Path) -> None:
    folder, words = with_answers(recipe, "killed"), ["train.save_every=1", "target.shard=true", "name=killed"]
    # The third forward, behind that of the warm start and that of the first step.
    ended = several.run("ddp", "killed_in_a_forward", recipe.parent / "killed-said", 3, recipe, *WORDS, *words)
    assert ended.codes == [2, -9], "\n".join(ended.stderr)
    assert "process 1 of 2 (host " in ended.stderr[0]
    assert "is gone: it was killed, or crashed, without a word" in ended.stderr[0]
    assert f"The last good checkpoint is {folder / 'step-1'}" in ended.stderr[0]


def test_what_one_runs_into_alone_is_told_by_who_reads_along(several: Ranks, recipe: Path) -> None:
    broken = with_answers(recipe, "damaged") / "teacher" / "states-00000.safetensors"  # the first process's to make, and to look at
    broken.parent.mkdir()
    broken.write_bytes(b"no states")
    ended = several.run("ddp", "train", recipe.parent / "damaged-said", recipe, *WORDS, "target.shard=true", "name=damaged")
    assert ended.codes == [2, 2], "\n".join(ended.stderr)
    assert f"{broken} is damaged" in ended.stderr[0]
    assert "process 0 of 2 (host " in ended.stderr[1]
    assert "ended with ValueError" in ended.stderr[1]


def test_a_quantised_target_is_refused_before_its_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(tiny_folder(tmp_path / "target"))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    monkeypatch.setattr(sharded, "load_model", None)
    with pytest.raises(ValueError, match=rf"target\.shard asked of {place}, whose weights are quantised"):
        sharded.load_sharded(str(place), "fp32", Accelerator(cpu=True))


def test_a_torch_that_cannot_leave_a_head_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "fully_shard", lambda module, *, mesh: module)
    with pytest.raises(RuntimeError, match=r"target\.shard asked with torch .*, whose FSDP2 cannot"):
        sharded.load_sharded("nothing here", "fp32", Accelerator(cpu=True))


def test_a_checkpoint_that_has_more_than_its_config_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    model.register_buffer("scale", torch.ones(1))
    bare = Mock(is_main_process=False)
    monkeypatch.setattr(sharded, "broadcast_object_list", lambda _: [sharded._told(model)])
    with pytest.raises(ValueError, match=r"built from its config has other tensors than its checkpoint gives \(scale\)"):
        sharded.spread(None, bare)


def test_a_run_may_go_on_with_its_target_in_parts_or_whole_again(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    recipe = load_recipe(path)
    recipe.folder.mkdir(parents=True)
    for written, now in (("true", "false"), ("false", "true")):
        (recipe.folder / "recipe.yaml").write_text(load_recipe(path, [f"target.shard={written}"]).dump())
        run.same_run(load_recipe(path, [f"target.shard={now}"]))
    (recipe.folder / "recipe.yaml").write_text(recipe.dump().replace("  shard: false\n", ""))  # by an earlier version
    run.same_run(load_recipe(path, ["target.shard=true"]))
    with pytest.raises(ValueError, match="another target"):
        run.same_run(load_recipe(path, ["target.shard=true", "target.dtype=bf16"]))
    with pytest.raises(ValueError, match=r"target\.shard: input should be a valid boolean, found 1"):
        load_recipe(path, ["target.shard=1"])


def test_answers_come_from_elsewhere(tmp_path: Path) -> None:
    (limit,) = [one for one in LIMITS if one.what == "target.shard without answers"]
    path = write_run(tmp_path)
    recipe = load_recipe(path, ["target.shard=true"])
    assert limit.asked(recipe)
    assert not limit.asked(load_recipe(path, ["target.shard=true", "server={url: 'http://host:8000/v1', model: one}"]))
    assert not limit.asked(load_recipe(path, ["target.shard=true", f"data.answers={tmp_path / 'train.jsonl'}"]))
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "answers.jsonl").write_text("")
    assert not limit.asked(recipe)
