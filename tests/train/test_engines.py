"""One recipe on several engines: the same numbers on each, checkpoints that each can go on from, and what one cannot do refused by name."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from draftsmith.distill import DistillDraft, WholeDraft, collate
from draftsmith.distill.making.drafts import recomputed
from draftsmith.distill.making.lora import with_lora
from draftsmith.recipes import load_recipe, runs
from draftsmith.specdec import load
from draftsmith.specdec.models import blocks
from draftsmith.train import run
from draftsmith.train.engines import ENGINES, LAUNCHED, LIMITS, NAMES, SHARDED, table
from draftsmith.train.launch import make_accelerator
from ranks import HOSTILE, SEVERAL, Ranks
from runs import chats, options, told, weights, with_answers, write_run
from steps import CASES, ROWS
from tiny import tiny

SHARDS = [one for one in SEVERAL if one in SHARDED]
WORDS = ["train.epochs=2", "train.batch_size=2", "train.save_every=2", "train.evaluate_every=2"]


@pytest.fixture(scope="module")
def alone(several: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The steps on one process, by case."""
    place = tmp_path_factory.mktemp("alone")
    return {case: numbers(several, "single", case, place / case) for case in CASES if case != "sharded"}


@pytest.fixture(scope="module")
def in_halves(several: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The steps in bf16 on two processes under DDP."""
    return numbers(several, "ddp", "bf16", tmp_path_factory.mktemp("in_halves"))


def numbers(several: Ranks, engine: str, case: str, place: Path) -> dict[str, Any]:
    ended = several.run(engine, "numbers", place, case)
    assert not any(ended.codes), "\n".join(ended.stderr)
    return ended.told


def close(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[name], other[name], tolerance) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-9)


@pytest.mark.parametrize("engine", SEVERAL)
@pytest.mark.parametrize("target", ["fp32", "sharded"])
def test_loss_norm_weights_and_held_out_figures_are_those_of_one_process(
    target: str, engine: str, several: Ranks, alone: Any, tmp_path: Path
) -> None:
    found = numbers(several, engine, target, tmp_path)
    assert (found["engine"], found["processes"]) == (engine, 2)
    assert found["layers"] == alone["fp32"]["layers"] == ["torch.float32"]
    assert found["parts"] == (engine in SHARDED)
    mine, every = found["target"]
    assert every == alone["fp32"]["target"][1]
    assert (mine < 0.6 * every) == (target == "sharded")
    assert [one["scored"] for one in found["steps"]] == [32, 1, 0, 20, 32]
    for what in ("steps", "held_out"):
        assert close(found[what], alone["fp32"][what], 1e-5), what
    assert close(found["weights"], alone["fp32"]["weights"], 1e-6)


@pytest.mark.parametrize("case", ["bf16", "bf16 recomputed"])
@pytest.mark.parametrize("engine", SEVERAL)
def test_bf16_is_autocast_over_float32_everywhere(
    engine: str, case: str, several: Ranks, alone: Any, in_halves: Any, tmp_path: Path
) -> None:
    found = numbers(several, engine, case, tmp_path)
    assert found["layers"] == alone["bf16"]["layers"] == ["torch.bfloat16"]
    assert found["dtypes"] == ["torch.float32"]
    assert found["calls"] == (23 if "recomputed" in case else 13)
    assert close(found["steps"], in_halves["steps"], 1e-5), "among the engines"
    assert close(found["steps"], alone["bf16"]["steps"], 1e-3), (
        "bfloat16 has three digits, and a product of other shape other last ones"
    )
    assert not close(alone["bf16"]["steps"], alone["fp32"]["steps"], 1e-5)


@pytest.mark.parametrize("engine", SEVERAL)
def test_rows_that_share_sequences_teach_what_they_teach_apart(engine: str, several: Ranks, alone: Any, tmp_path: Path) -> None:
    found = numbers(several, engine, "packed", tmp_path)
    assert found["calls"] < alone["fp32"]["calls"]
    for one in (found, alone["packed"]):
        assert close(one["steps"], alone["fp32"]["steps"], 1e-5)
        assert close(one["weights"], alone["fp32"]["weights"], 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_that_are_made_again_give_the_same_bits(precision: str, alone: Any) -> None:
    once, again = alone[precision], alone["recomputed" if precision == "fp32" else "bf16 recomputed"]
    assert {name: one for name, one in again.items() if name != "calls"} == {
        name: one for name, one in once.items() if name != "calls"
    }
    assert (once["calls"], again["calls"]) == (15, 25)  # 10 micro-batches and 5 that are held out


@pytest.mark.parametrize("adapters", [False, True])
def test_blocks_of_whole_models_and_adapters_are_made_again(adapters: bool) -> None:
    slopes = []
    for again in (False, True):
        model = with_lora(tiny(seed=1), 2, 4, "all-linear") if adapters else tiny(seed=1)
        objective = DistillDraft(WholeDraft(model), tiny())
        calls: list[int] = []
        blocks(objective.draft.model)[1][0].mlp.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(1))  # type: ignore[misc]
        if again:
            recomputed(objective.draft)
        objective.trainable.train()  # transformers keeps blocks whole in eval mode
        objective.loss(collate(ROWS)).total.backward()
        assert len(calls) == 1 + again
        slopes.append([one.grad for one in objective.trainable.parameters() if one.requires_grad])
    assert len(slopes[0]) == len(slopes[1]) > 2
    assert all(torch.equal(*both) for both in zip(*slopes, strict=True))


def test_gradient_checkpointing_may_change_between_two_calls_and_is_not_for_exits(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    recipe = load_recipe(path, ["train.gradient_checkpointing=blocks"])
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "recipe.yaml").write_text(load_recipe(path).dump().replace("  gradient_checkpointing: none\n", ""))
    run.same_run(recipe)
    with pytest.raises(ValueError, match="another train"):
        run.same_run(load_recipe(path, ["train.epochs=9"]))
    with pytest.raises(ValueError, match="gradient_checkpointing is not offered for a draft of kind exits"):
        load_recipe(path, ["train.gradient_checkpointing=blocks", *REFUSED["draft.kind: exits"]])


@pytest.mark.parametrize("engine", SHARDS)
def test_blocks_of_sharded_weights_are_made_again(engine: str, several: Ranks, alone: Any, tmp_path: Path) -> None:
    found = numbers(several, engine, "recomputed", tmp_path)
    assert found["calls"] == 23  # of the 5 held out 3 on each, one of them for company
    assert close(found["steps"], alone["fp32"]["steps"], 1e-5)


# Steps of 8 sequences on one process and on two; sequences hold unlike numbers of rows, and the last step of a block few of them.
CHATS: dict[str, list[str]] = {
    "packed by workers": ["data.pack=96", "data.workers=2", "data.long=split", "train.epochs=1"],
    "streamed and packed": ["data.stream=16", "data.pack=64", "train.steps=4", "train.save_every=2"],
}
HALVES = ["train.batch_size=2", "train.accumulate=2"]


@pytest.fixture(scope="module")
def chatty(several: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, object]]]]:
    """The recipe of runs over chats, and what they told on one process."""
    place = tmp_path_factory.mktemp("chatty")
    recipe, found = chats(place), {}
    for what, words in CHATS.items():
        name = f"name={what.replace(' ', '-')}"
        ended = several.run(
            "single", "train", place / "said", recipe, *options(place, *words, name), "train.batch_size=4", HALVES[1]
        )
        assert not any(ended.codes), "\n".join(ended.stderr)
        found[what] = told(place / "runs" / name[5:])
    return recipe, found


@pytest.mark.parametrize("engine", SEVERAL)
@pytest.mark.parametrize("what", CHATS)
def test_packs_streams_and_workers_give_the_numbers_of_one_process(
    engine: str, what: str, several: Ranks, chatty: tuple[Path, dict[str, list[dict[str, object]]]], tmp_path: Path
) -> None:
    recipe, alone = chatty
    words = options(recipe.parent, *CHATS[what], *HALVES, f"runs={tmp_path}", f"name={engine}")
    if "streamed" in what and engine in SHARDED:
        cut = several.run(engine, "ended_at", tmp_path / "cut", 3, recipe, *words)
        assert cut.codes == [75, 75], "\n".join(cut.stderr)
        assert runs.state(tmp_path / engine / "step-3")["plan"]["at"]["first"] == 2, "the block of the last step, in steps"
    ended = several.run(engine, "train", tmp_path / "said", recipe, *words)
    assert not any(ended.codes), "\n".join(ended.stderr)
    mine = told(tmp_path / engine)
    for name in ("step", "scored", "loss", "grad_norm", "held_out"):
        here, there = ([line[name] for line in one if name in line] for one in (mine, alone[what]))
        assert close(here, there, 1e-5 if name != "held_out" else 1e-4), (name, here, there)


@pytest.fixture(scope="module")
def undisturbed(several: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run on two processes, and the run."""
    place = tmp_path_factory.mktemp("undisturbed")
    recipe = write_run(place, 10)
    ended = several.run("ddp", "train", place / "said", recipe, *WORDS)
    assert not any(ended.codes), "\n".join(ended.stderr)
    return recipe


@pytest.mark.parametrize("engine", [one for one in SEVERAL if one != "ddp"])
def test_a_run_is_interrupted_and_goes_on_with_whole_drafts(engine: str, several: Ranks, undisturbed: Path, tmp_path: Path) -> None:
    found, words = with_answers(undisturbed, engine), [*WORDS, f"name={engine}"]
    first = several.run(engine, "ended_at", tmp_path / "first", 3, undisturbed, *words)
    assert first.codes == [75, 75], "\n".join(first.stderr)
    assert f"2 processes on cpu, {LAUNCHED[engine]}, 1 threads each" in first.stdout[0]
    assert [one.name for one in runs.steps(found)] == ["step-2", "step-3"]
    # FSDP2's parts are read by any number of processes, DeepSpeed's by as many as wrote them.
    shard = f"target.shard={json.dumps(engine in SHARDED)}"  # may change between two calls
    again = several.run(engine, "train", tmp_path / "again", undisturbed, *words, shard, processes=3 if engine == "fsdp2" else 2)
    assert not any(again.codes), "\n".join(again.stderr)
    assert "going on from step 3" in again.stdout[0]
    assert ("the target is in parts: " in again.stdout[0]) == (engine in SHARDED)
    whole = undisturbed.parent / "runs" / "small"
    ours, theirs = weights(found), weights(whole)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        both = [torch.frombuffer(bytearray(bits), dtype=torch.float32) for bits in (one, theirs[name])]
        assert torch.allclose(*both, atol=2e-5), name
    steps = [[line for line in told(folder) if "loss" in line] for folder in (found, whole)]
    assert [line["step"] for line in steps[0]] == [1, 2, 3, 4]
    for what in ("loss", "grad_norm"):
        assert close([line[what] for line in steps[0]], [line[what] for line in steps[1]], 2e-5)
    assert runs.best(found) is not None
    environment = [json.loads((folder / "environment.json").read_text()) for folder in (found, whole)]
    assert environment[0]["trainable_parameters"] == environment[1]["trainable_parameters"] > 0
    assert [one["engine"] for one in environment] == [engine, "ddp"]
    load(runs.steps(found)[-1] / "draft")
    other = several.run("single", "train", tmp_path / "other", undisturbed, *words, "train.learning_rate=1e-3")
    assert other.codes == [2]
    kept = engine if engine == "fsdp2" else f"{engine} of 2"
    assert f"cannot go on from step-4: its trainer's state is {kept}, and this launch reads whole" in other.stderr[0]


def test_a_target_is_whole_on_every_process_whatever_the_launcher_said(undisturbed: Path, several: Ranks, tmp_path: Path) -> None:
    assert {"FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_DEEPSPEED_ZERO3_INIT"} <= HOSTILE.keys()
    for engine in SHARDS:
        found = several.run(engine, "target", tmp_path / engine, undisturbed)
        assert not any(found.codes), "\n".join(found.stderr)
        model = load(undisturbed.parent / "target").model
        assert found.told == [[float(one.detach().double().sum()) for one in model.parameters()]] * 2


REFUSED = {
    "target.shard": ["target.shard=true", "data.format=messages", "data.words=target"],
    "target.shard without answers": ["target.shard=true"],
    "target.shard with exits of head block or lora": [
        "target.shard=true",
        "data.format=messages",
        "data.words=target",
        "draft={kind: exits, exits: [{layer: 1, rank: 4}, {layer: 2, head: block, rank: 4}]}",
    ],
    "draft.kind: width or checkpoint": ["draft={kind: width, intermediate: 16}"],
    "draft.kind: exits": ["draft={kind: exits, exits: [{layer: 1, rank: 4}]}"],
    "train.on_policy": ["train.on_policy={share: 0.5}"],
    "train.skip_bad_steps": ["train.skip_bad_steps=3"],
    "target.dtype below fp32 without train.precision: bf16": ["target.dtype=bf16"],
}


def launch_of(name: str) -> Any:
    kind = {"fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "ddp": "MULTI_GPU", "single": "NO"}[name]
    plugin = SimpleNamespace(zero_stage=int(name[-1])) if kind == "DEEPSPEED" else None
    return SimpleNamespace(
        distributed_type=DistributedType(kind), is_main_process=True, num_processes=1 if name == "single" else 2, device="cpu",
        process_index=0, state=SimpleNamespace(deepspeed_plugin=plugin),
    )  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.what)
def test_what_an_engine_cannot_do_is_refused_before_anything_is_loaded(
    name: str, limit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "launched", lambda *_: contextlib.nullcontext(launch_of(name)))
    monkeypatch.setattr(run, "load", loads := Mock(side_effect=InterruptedError))
    monkeypatch.setattr(run, "load_sharded", loads)
    monkeypatch.setattr(run, "company", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run.checkpoint, "sound", lambda *_: None)
    recipe = load_recipe(write_run(tmp_path), REFUSED[limit.what])
    refused = name in limit.engines
    said = re.escape(f"{limit.what} asked with {NAMES[name]}: {limit.why}. {limit.instead}") if refused else None
    with pytest.raises(ValueError if refused else InterruptedError, match=said):
        run.run_training(recipe)
    assert loads.called is not refused


def test_the_page_has_the_table_of_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    assert "\n".join(table()) in page


LAUNCHES = {
    "no DeepSpeed": (
        {"ACCELERATE_USE_DEEPSPEED": "true"},
        r"DeepSpeed was launched and is not installed: pip install 'draftsmith\[deepspeed\]'",
    ),
    "ZeRO-0": ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "ZeRO stage 0, which shards nothing"),
    "FSDP1": ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP 1 was launched; only FSDP2 is known here"),
    "FSDP's own checkpointing": (
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
        "train.gradient_checkpointing=blocks",
    ),
    "Megatron-LM": ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM was launched; processes share rows here"),
    "tensor parallelism": ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "a parallelism_config .* was launched"),
    "FSDP2 on a CPU": (
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "LOCAL_RANK": "0"},
        "FSDP asked for here would silently train unsharded",
    ),
}


@pytest.mark.parametrize("what", LAUNCHES)
def test_a_launch_that_cannot_be_kept_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, said = LAUNCHES[what]
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")  # put back when the test is over
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if what == "no DeepSpeed" else SimpleNamespace(name=name))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=said):
        make_accelerator("no")
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == ("false" if what == "FSDP2 on a CPU" else "true")


def test_a_launcher_that_accumulates_does_not_divide_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert isinstance(found := make_accelerator("no"), Accelerator)
    assert found.gradient_accumulation_steps == 1
