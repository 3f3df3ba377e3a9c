"""A checkpoint that the disk spoiled is named; the one before it is taken only where the recipe says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.recipes import load_recipe, runs
from draftsmith.recipes.checksums import SUMS, damage
from draftsmith.train import checkpoint
from draftsmith.train.record import Log
from draftsmith.train.run import same_run
from finished import a_run
from runs import inside, write_run
from small import Small

PLAN = {"size": 4}


def saved(folder: Path, steps: list[int], unjudged: tuple[int, ...] = (), keep: int = 2) -> None:
    accelerator, objective = Accelerator(cpu=True), Small()
    objective.trainable = accelerator.prepare(objective.trainable)
    for step in steps:
        with torch.no_grad():
            next(objective.trainable.parameters()).fill_(step)
        figures = None if step in unjudged else {"block_length": 10.0 - step}
        checkpoint.save(folder, step, objective, accelerator, figures, PLAN, keep, 0)


def gone_on(folder: Path, on_damage: str = "stop") -> tuple[int, float]:
    """The step and the weight that a run goes on from."""
    accelerator, objective = Accelerator(cpu=True), Small()
    objective.trainable = accelerator.prepare(objective.trainable)
    checkpoint.sound(folder, on_damage, accelerator)
    return checkpoint.resume(folder, accelerator, PLAN, 2), next(objective.trainable.parameters()).item()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (lambda place: flip(place / "trainer" / "model.safetensors"), r"trainer/model.safetensors \(\d+ bytes\) has sha256"),
    "a short file": (lambda place: os.truncate(place / "draft" / "weight", 1), r"draft/weight \(1 bytes\) has sha256 .* expected was"),
    "a file lost": (lambda place: (place / "state.json").unlink(), "state.json is missing, of which sha256 [0-9a-f]{64} was expected"),
    "a file too many": (lambda place: (place / "draft" / "more").touch(), "draft/more is not in its SHA256SUMS"),
    "no sums": (lambda place: (place / SUMS).unlink(), "it has no SHA256SUMS"),
    "half the sums": (lambda place: os.truncate(place / SUMS, 100), "its SHA256SUMS is cut off after 100 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken_only_if_the_recipe_says_so(tmp_path: Path, what: str) -> None:
    saved(tmp_path, [4, 8])
    assert gone_on(tmp_path) == (8, 8.0)
    spoil, told = DAMAGES[what]
    spoil(tmp_path / "step-8")
    with pytest.raises(
        ValueError, match=f"step-8 is damaged: .*({told}).*train.on_damage=previous goes on from the checkpoint before"
    ):
        gone_on(tmp_path)
    assert (tmp_path / "step-8").is_dir()
    assert gone_on(tmp_path, "previous") == (4, 4.0)
    assert [one.name for one in runs.named(tmp_path)] == ["step-4"]
    assert (tmp_path / "damaged-step-8").is_dir()
    assert runs.best(tmp_path) == tmp_path / "step-4"
    saved(tmp_path, [8])
    assert gone_on(tmp_path) == (8, 8.0), "what is made anew has its name"


def test_damage_in_a_best_that_is_not_the_last_is_named_where_it_is_read(tmp_path: Path) -> None:
    saved(tmp_path, [4, 8, 12])
    assert runs.find_draft(tmp_path, "best") == tmp_path / "step-4" / "draft"
    flip(tmp_path / "step-4" / "trainer" / "model.safetensors")
    assert runs.find_draft(tmp_path, "best"), "of no concern to who reads the draft"
    flip(tmp_path / "step-4" / "draft" / "weight")
    assert gone_on(tmp_path) == (12, 12.0)
    assert runs.find_draft(tmp_path, "latest") == tmp_path / "step-12" / "draft"
    with pytest.raises(
        ValueError, match=r"step-4, which is run:best, is damaged: draft/weight .* or remove step-4, and draftsmith train"
    ):
        runs.find_draft(tmp_path, "best")
    shutil.rmtree(tmp_path / "step-4")
    assert gone_on(tmp_path) == (12, 12.0)
    assert runs.find_draft(tmp_path, "best") == tmp_path / "step-8" / "draft", "what was said does"


@pytest.mark.parametrize("words", [["export"], ["eval", "eval.candidates=[{drafter: run:best, k: 2}]"]])
def test_a_draft_that_the_disk_spoiled_is_neither_exported_nor_measured(words: list[str], tmp_path: Path) -> None:
    recipe = a_run(tmp_path)
    flip(recipe.folder / "step-4" / "draft" / "model.safetensors")
    done = inside(words[0], tmp_path / "small.yaml", *words[1:])
    assert done.returncode == 2
    assert "step-4, which is run:best, is damaged: draft/model.safetensors (" in done.stderr
    assert not (recipe.folder / "export").exists()
    assert not (recipe.folder / "report.json").exists()


def test_a_file_of_the_run_that_is_no_json_is_named(tmp_path: Path) -> None:
    saved(tmp_path, [4, 8])
    os.truncate(tmp_path / "best.json", 20)
    with pytest.raises(ValueError, match=r"best\.json is damaged \(.*\): remove it, and draftsmith train RECIPE writes it again"):
        runs.find_draft(tmp_path, "best")
    (tmp_path / "best.json").unlink()
    assert gone_on(tmp_path) == (8, 8.0)
    assert runs.find_draft(tmp_path, "best") == tmp_path / "step-4" / "draft"
    os.truncate(tmp_path / "step-4" / "state.json", 20)
    with pytest.raises(ValueError, match=r"step-4/state\.json is damaged \(.*\): remove step-4"):
        gone_on(tmp_path)


def test_where_none_is_whole_nothing_is_moved_and_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    saved(tmp_path, [4, 8])
    flip(tmp_path / "step-4" / "state.json")
    (tmp_path / "step-8" / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no checkpoint that is whole \(step-8: state.json is missing.*step-4: state.json \("):
            gone_on(tmp_path, "previous")
    assert [one.name for one in runs.named(tmp_path)] == ["step-4", "step-8"]


def test_the_sums_are_read_by_sha256sum_too(tmp_path: Path) -> None:
    saved(tmp_path, [4])
    check = ["sha256sum", "--check", "--strict", SUMS]
    assert subprocess.run(check, cwd=tmp_path / "step-4", capture_output=True).returncode == 0
    assert damage(tmp_path / "step-4") is None
    flip(tmp_path / "step-4" / "draft" / "weight")
    assert subprocess.run(check, cwd=tmp_path / "step-4", capture_output=True).returncode == 1


def test_one_that_was_asked_for_between_two_evaluations_is_gone_with_the_next_and_never_the_best(tmp_path: Path) -> None:
    saved(tmp_path / "asked", [1], unjudged=(1,))
    assert runs.best(tmp_path / "asked") is None
    assert gone_on(tmp_path / "asked") == (1, 1.0)
    saved(tmp_path / "asked", [2, 3, 4, 5, 6], unjudged=(3, 5))
    saved(tmp_path / "undisturbed", [2, 4, 6])
    assert [one.name for one in runs.steps(tmp_path / "asked")] == ["step-2", "step-4", "step-6"]
    assert (tmp_path / "asked" / "best.json").read_text() == (tmp_path / "undisturbed" / "best.json").read_text()


def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    saved(tmp_path, [4])
    for name in (".step-7.writing", ".step-2.old"):
        (tmp_path / name / "trainer").mkdir(parents=True)
    assert gone_on(tmp_path) == (4, 4.0)
    assert not list(tmp_path.glob(".*"))


def test_what_is_done_at_faults_may_change_between_calls_and_what_is_learned_may_not(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    recipe = load_recipe(path)
    recipe.folder.mkdir(parents=True)
    dumped = recipe.dump()
    assert "  on_damage: stop\n" in dumped
    (recipe.folder / "recipe.yaml").write_text(dumped.replace("  on_damage: stop\n", ""))  # as an older version wrote it
    same_run(load_recipe(path, ["train.on_damage=previous"]))
    with pytest.raises(ValueError, match="holds a run with another train"):
        same_run(load_recipe(path, ["train.learning_rate=1"]))
    for damaged in (b"", b"name: [", b"\xff\xfe"):
        (recipe.folder / "recipe.yaml").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"recipe\.yaml is damaged, so nothing says what .* or remove the folder"):
            same_run(recipe)


def test_a_line_that_a_full_disk_cut_off_is_dropped_even_where_it_looks_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "held_out": {"block_length": 1.5}')
    assert runs.metrics(tmp_path) == [{"step": 1}]
    Log(path, True).goes_on_from(2)
    assert path.read_text() == '{"step": 1}\n'
