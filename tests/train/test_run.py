"""A training run on disk: complete, resumed bit for bit after kills, refused where the folder holds another run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import main
from draftsmith.recipes import load_recipe, runs
from draftsmith.specdec import load
from draftsmith.specdec.models import Loaded, blocks
from draftsmith.specdec.places import revision
from draftsmith.train.data.plan import to_rows
from draftsmith.train.data.prepare import identity, read_answers
from runs import draftsmith, kill_when, launched, told, weights, write_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests that change its folder copy it first."""
    place = tmp_path_factory.mktemp("undisturbed")
    recipe = write_run(place)
    done = draftsmith("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "1 process on cpu" in done.stdout
    assert "held-out acceptance" in done.stdout
    assert re.search(r"^memory: [1-9]\d* MB of tensors expected$", done.stdout, re.M), "predicted before the first step"
    assert re.search(r"^memory: \d+ MB more than before, at most$", done.stdout, re.M), "measured after the last one"
    (longest,) = re.findall(
        r"^the longest row has (\d+) tokens, the draft reads 2048: what it is worth further in", done.stdout, re.M
    )
    assert int(longest) == json.loads((place / "runs" / "small" / "environment.json").read_text())["longest_row"]
    return place


def test_the_run_folder_explains_itself(undisturbed: Path) -> None:
    run = undisturbed / "runs" / "small"
    recipe = load_recipe(run / "recipe.yaml")
    assert recipe.name == "small"
    about = json.loads((run / "environment.json").read_text())
    assert about["target_revision"] == revision(undisturbed / "target")
    assert about["versions"]["torch"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, steps[-1]["step"] + 1))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {"acceptance", "agreement", "grad_norm", "learning_rate", "scored", "tokens_per_second"} <= steps[0].keys()
    held_out = [line["held_out"]["block_length"] for line in lines if "held_out" in line]
    best = json.loads((run / "best.json").read_text())
    assert best["held_out"]["block_length"] == max(held_out)
    assert len(runs.steps(run)) <= recipe.train.keep + 1
    fit = json.loads((run / "start" / "warm" / "fit.json").read_text())
    assert fit["acceptance"] > fit["before"]
    for which in runs.NAMED:
        folder = runs.find_draft(run, which)
        assert load(undisturbed / "target").tokenizer is not None
        assert (folder / "model.safetensors").is_file()
        assert json.loads((folder / "drafter.json").read_text())["kind"] == "model"


def test_every_scored_token_is_an_answers_own_eos_included(undisturbed: Path) -> None:
    run = undisturbed / "runs" / "small"
    tokenizer = load(undisturbed / "target").tokenizer
    answers = read_answers(run / "answers.jsonl", identity(revision(undisturbed / "target"), tokenizer))
    rows = to_rows(answers, tokenizer, 1024, 0.2, 3)
    assert sorted(row.answers for row in [*rows.train, *rows.held_out]) == sorted(row["answer_ids"] for row in answers)
    assert any(row["finished"] for row in answers), "the tiny target must say EOS sometimes, or nothing is tested"


def test_killed_twice_it_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path)
    shutil.copytree(undisturbed / "target", tmp_path / "target", dirs_exist_ok=True)
    run = tmp_path / "runs" / "small"
    metrics = run / "metrics.jsonl"
    kill_when(
        lambda: metrics.is_file() and metrics.read_text().count('"loss"') >= 2, "train", recipe
    )  # before the first checkpoint
    kill_when(lambda: bool(runs.steps(run)) and runs.number(runs.steps(run)[-1]) >= 8, "train", recipe)
    done = draftsmith("train", recipe)
    assert done.returncode == 0, done.stderr
    assert "going on from step" in done.stdout
    assert weights(run) == weights(undisturbed / "runs" / "small")

    assert told(run) == told(undisturbed / "runs" / "small"), "no step is recorded twice, and each as it was"
    assert not list(run.glob(".*"))


def test_on_policy_killed_between_two_refreshes_it_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path)
    shutil.copytree(undisturbed / "target", tmp_path / "target", dirs_exist_ok=True)
    words = [f"data.answers={undisturbed / 'runs' / 'small' / 'answers.jsonl'}"]
    words += ["train.on_policy={share: 0.6, refresh_every: 10, rows: 8, max_new_tokens: 8}"]
    whole = draftsmith("train", recipe, "name=whole", *words)
    assert whole.returncode == 0, whole.stderr
    assert "on policy: " in whole.stdout
    run = tmp_path / "runs" / "cut"
    kill_when(lambda: bool(runs.steps(run)) and runs.number(runs.steps(run)[-1]) >= 12, "train", recipe, "name=cut", *words)
    assert 12 <= runs.number(runs.steps(run)[-1]) < 20, "the kill must come while the rows of steps 11 to 20 are in use"
    done = draftsmith("train", recipe, "name=cut", *words)
    assert done.returncode == 0, done.stderr
    assert weights(run) == weights(tmp_path / "runs" / "whole")
    lines = told(run)
    assert lines == told(tmp_path / "runs" / "whole")
    assert len([line for line in lines if "written_by_the_draft" in line]) == 3
    assert {line.get("on_policy") for line in lines if "loss" in line} == {True, False}
    assert weights(run) != weights(undisturbed / "runs" / "small")
    refused = draftsmith("validate", recipe, *words, "train.teacher=stored")
    assert refused.returncode == 2
    assert "take teacher: live or states" in refused.stderr


def test_patience_stops_a_run_which_then_stays_stopped(undisturbed: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path)
    shutil.copytree(undisturbed / "target", tmp_path / "target", dirs_exist_ok=True)
    words = [f"data.answers={undisturbed / 'runs' / 'small' / 'answers.jsonl'}", "train.learning_rate=1e-12", "train.patience=2"]
    words += [
        "train.evaluate_every=1",
        "train.save_every=100",
    ]  # a rate that moves no weight: no evaluation is better than the first
    for _ in range(2):
        done = draftsmith("train", recipe, *words)
        assert done.returncode == 0, done.stderr
        assert "stopped at step-3 of 28: no better held-out block_length in 2 evaluations" in done.stdout
        run = tmp_path / "runs" / "small"
        assert [one.name for one in runs.steps(run)] == ["step-1", "step-3"]
        assert json.loads((run / "best.json").read_text())["checkpoint"] == "step-1"
        assert [line["step"] for line in told(run) if "stopped" in line] == [3]


def test_a_finished_run_is_left_as_it_is(undisturbed: Path) -> None:
    before = weights(undisturbed / "runs" / "small")
    done = draftsmith("train", undisturbed / "small.yaml")
    assert done.returncode == 0, done.stderr
    assert weights(undisturbed / "runs" / "small") == before


def test_a_checkpoint_of_another_plan_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    """Other answers in the same file, or another number of processes: the steps done would not be those of this run."""
    shutil.copytree(undisturbed, tmp_path / "copy")
    run = tmp_path / "copy" / "runs" / "small"
    recipe = write_run(tmp_path / "copy")
    text = (run / "recipe.yaml").read_text().replace(str(undisturbed), str(tmp_path / "copy"))
    (run / "recipe.yaml").write_text(text)
    lines = (run / "answers.jsonl").read_text().splitlines()
    (run / "answers.jsonl").write_text(
        "\n".join(line.replace('"answer_ids": [', '"answer_ids": [65, ', 1) for line in lines) + "\n"
    )
    done = draftsmith("train", recipe)
    assert done.returncode == 2
    assert "another target or of other rows" in done.stderr
    shutil.rmtree(run / "teacher")
    done = draftsmith("train", recipe)
    assert done.returncode == 2
    assert "cannot go on from step-" in done.stderr
    assert "rows was" in done.stderr


def test_a_kill_between_a_checkpoint_and_the_pointer_to_the_best_is_mended(undisturbed: Path) -> None:
    run = undisturbed / "runs" / "small"
    before = (run / "best.json").read_text()
    (run / "best.json").unlink()
    done = draftsmith("train", undisturbed / "small.yaml")
    assert done.returncode == 0, done.stderr
    assert (run / "best.json").read_text() == before


def test_two_processes_train_a_whole_run(undisturbed: Path, tmp_path: Path) -> None:
    """One held-out batch for two processes, a stored teacher, a support: nobody waits for ever, one of them writes."""
    shutil.copytree(undisturbed / "target", tmp_path / "target")
    recipe = write_run(tmp_path)
    words = ["train.teacher=states", "train.support=answers", "train.epochs=1"]
    done = launched(2, "-m", "draftsmith.train", recipe, *words)
    assert "2 processes on cpu" in done.stdout
    assert done.stdout.count("best draft") == 1
    assert done.stderr.count("training: 1/") == done.stderr.count(" steps in ") == 1, "one of them tells of progress, in lines"
    run = tmp_path / "runs" / "small"
    assert [line for line in (run / "metrics.jsonl").read_text().splitlines() if "held_out" in line]
    alone = draftsmith("train", recipe, *words)
    assert alone.returncode == 0, alone.stderr
    assert "1 process on cpu" in alone.stdout, "a run goes on on another number of processes, with its own number of rows a step"


@pytest.mark.parametrize(
    ("words", "held"),
    [
        (["train.teacher=live"], True),
        (["train.teacher=states"], False),
        (["train.teacher=stored", "train.top_k=8"], False),
        (["train.teacher=states", "train.on_policy={share: 0.6, refresh_every: 10, rows: 8, max_new_tokens: 8}"], True),
    ],
)
def test_a_target_is_held_while_training_only_where_it_is_asked(
    words: list[str], held: bool, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(undisturbed / "target", tmp_path / "target")
    targets: list[Any] = []

    def loading(*asked: Any) -> Loaded:
        targets.append((found := load(*asked)).model)
        return found

    monkeypatch.setattr("draftsmith.train.run.load", loading)
    assert main(["train", str(write_run(tmp_path)), *words, "train.epochs=1"]) == 0
    (target,) = targets
    assert {one.is_meta for one in blocks(target)[1].parameters()} == {not held}
    assert not target.get_output_embeddings().weight.is_meta


def test_dropout_does_not_break_an_exact_resume(tmp_path: Path) -> None:
    from tiny import tiny_folder

    recipe = write_run(tmp_path)
    tiny_folder(tmp_path / "target", attention_dropout=0.2)
    whole = draftsmith("train", recipe, "name=whole")
    assert whole.returncode == 0, whole.stderr
    answers = f"data.answers={tmp_path / 'runs' / 'whole' / 'answers.jsonl'}"
    assert draftsmith("train", recipe, "name=cut", answers).returncode == 0
    run = tmp_path / "runs" / "cut"
    wanted = weights(run)
    shutil.rmtree(runs.steps(run)[-1])
    assert draftsmith("train", recipe, "name=cut", answers).returncode == 0
    assert weights(run) == wanted
    assert wanted == weights(tmp_path / "runs" / "whole")


def test_another_recipe_in_the_same_folder_is_refused(undisturbed: Path) -> None:
    done = draftsmith("train", undisturbed / "small.yaml", "train.learning_rate=1")
    assert done.returncode == 2
    assert "holds a run with another train" in done.stderr
    assert load_recipe(undisturbed / "runs" / "small" / "recipe.yaml").train.learning_rate == 1e-3


def test_without_a_warm_start_the_draft_starts_as_it_was_cut(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "copy")
    recipe = write_run(tmp_path / "copy")
    answers = tmp_path / "copy" / "runs" / "small" / "answers.jsonl"
    done = draftsmith(
        "train", recipe, "name=cold", "draft.warm_start=none", "train.epochs=1", f"data.answers={answers}", "train.accumulate=2", "train.loss={total_variation: 1}"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "copy" / "runs" / "cold" / "start" / "warm").exists()


def test_answers_of_another_target_are_refused(undisturbed: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path)
    from tiny import tiny_folder

    tiny_folder(tmp_path / "target", seed=9)
    done = draftsmith("train", recipe, f"data.answers={undisturbed / 'runs' / 'small' / 'answers.jsonl'}")
    assert done.returncode == 2
    assert "A draft learns what its own target says" in done.stderr
