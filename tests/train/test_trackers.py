"""Trackers are told the figures of metrics.jsonl through accelerate; one that is not installed is refused before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType

from draftsmith.recipes import load_recipe
from draftsmith.recipes.train_settings import Tracker
from draftsmith.train import trackers
from runs import inside, told, write_run


class Told(GeneralTracker):  # type: ignore[misc]
    """Stands in for tensorboard; what a launch told it is `seen`. It fails where `fails` says so."""

    name = "tensorboard"
    requires_logging_directory = True
    seen: dict[str, Any]
    fails = ""

    def __init__(self, run_name: str, logging_dir: str = "", **settings: Any) -> None:
        super().__init__()
        type(self).seen = {"name": run_name, "logs": logging_dir, "settings": settings, "lines": [], "finished": False}

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self.fail("start")
        self.begun = True

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen["config"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.fail(f"step {step}")
        self.seen["lines"].append((step, values))

    def finish(self) -> None:
        self.fail("the end")
        self.seen["finished"] = self.begun

    def fail(self, where: str) -> None:
        if self.fails == where:
            raise Unreachable("no such host")


class Wandb(Told):
    """Stands in for one that is a run of its own at each start."""

    name = "wandb"
    requires_logging_directory = False


class Unreachable(Exception):
    """An error of a tracker's own."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Told)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Wandb)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD, LoggerType.WANDB])
    for name in ("TRACKIO_DIR", "WANDB_MODE"):
        monkeypatch.setenv(name, "mine")


def test_the_names_are_accelerates() -> None:
    assert {*get_args(Tracker)} == {str(one) for one in LoggerType} - {"all"}


def test_one_that_is_not_installed_is_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TENSORBOARD])
    words = ["train.trackers=[tensorboard, comet_ml]", "target.model=package:not_there/x.gguf"]
    done = inside("train", write_run(tmp_path), *words)
    assert done.returncode == 2
    assert "asks for comet_ml, which accelerate does not find here (found: tensorboard). pip install comet-ml" in done.stderr
    unknown = inside("train", tmp_path / "small.yaml", "train.trackers=[tensorbord]")
    assert unknown.returncode == 2
    assert "train.trackers" in unknown.stderr
    assert not (tmp_path / "runs").exists()


def test_it_is_told_what_the_log_is_told_and_goes_on_behind_the_last_checkpoint(stand_in: None, tmp_path: Path) -> None:
    recipe, run = write_run(tmp_path), tmp_path / "runs" / "small"
    words = ["train.epochs=1", "train.trackers=[tensorboard, wandb]", "draft={layers: [0], warm_start: none}"]
    done = inside("train", recipe, *words)
    assert done.returncode == 0, done.stderr
    seen = Told.seen
    assert Wandb.seen["lines"] == seen["lines"]
    assert (seen["name"], seen["logs"], seen["finished"]) == ("small", str(run / "logs"), True)
    assert seen["config"]["train.learning_rate"] == 1e-3
    assert seen["config"]["draft.layers"] == "[0]"
    steps = [line for line in told(run) if "loss" in line]
    assert [(step, values["loss"]) for step, values in seen["lines"] if "loss" in values] == [
        (one["step"], one["loss"]) for one in steps
    ]
    judged = [(step, values["held_out/block_length"]) for step, values in seen["lines"] if "held_out/block_length" in values]
    assert judged == [(line["step"], line["held_out"]["block_length"]) for line in told(run) if "held_out" in line]  # type: ignore[index]
    assert judged
    last = sorted(run.glob("step-*"), key=lambda one: int(one.name[5:]))[-1]
    last.rename(run / "elsewhere")
    assert inside("train", recipe, *words).returncode == 0
    before = int(sorted(run.glob("step-*"), key=lambda one: int(one.name[5:]))[-2].name[5:])
    assert Told.seen["settings"]["purge_step"] == before + 1 == Told.seen["lines"][0][0]
    again = [[(step, values.get("loss")) for step, values in one["lines"]] for one in (Wandb.seen, seen)]
    assert again[0] == again[1], "another run over there, which has each step once, too"
    assert inside("train", recipe, "train.epochs=1", words[2]).returncode == 0, "no weight hangs on who is told"


@pytest.mark.parametrize("where, told_of", [("step 2", [1]), ("the end", [1, 2, 3, 4])])
def test_one_that_fails_is_named_once_and_told_no_more_and_the_training_goes_on(
    where: str, told_of: list[int], stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wandb, "fails", where)
    words = ["train.epochs=1", "train.batch_size=5", "train.trackers=[wandb, tensorboard]", "draft={layers: [0], warm_start: none}"]
    done = inside("train", write_run(tmp_path), *words)
    assert done.returncode == 0, done.stderr
    said = f"train.trackers: wandb failed at {where} (Unreachable: no such host) and is told no more; the training goes on"
    assert done.stderr.count(said) == done.stderr.count("failed") == 1
    steps = [line["step"] for line in told(tmp_path / "runs" / "small") if "loss" in line]
    assert steps == [1, 2, 3, 4]
    for one, every in ((Wandb, told_of), (Told, steps)):
        assert [step for step, values in one.seen["lines"] if "loss" in values] == every
    assert (Told.seen["finished"], Wandb.seen["finished"]) == (True, False)


def test_one_that_does_not_start_is_an_error_before_the_first_step(
    stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wandb, "fails", "start")
    recipe = write_run(tmp_path)
    words = ["train.epochs=1", "draft={layers: [0], warm_start: none}"]
    done = inside("train", recipe, *words, "train.trackers=[tensorboard, wandb]")
    assert done.returncode == 2
    assert "one of tensorboard, wandb did not start (Unreachable: no such host). Mend it, or leave it out" in done.stderr
    assert inside("train", recipe, *words).returncode == 0
    assert next(line["step"] for line in told(tmp_path / "runs" / "small") if "loss" in line) == 1


def test_wandb_is_offline_where_it_has_neither_a_mode_nor_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not trackers.wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert trackers.wandb_key()
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert trackers.wandb_key()


@pytest.mark.parametrize("mode, key, found", [(None, "", "offline"), ("online", "", "online"), (None, "x", None)])
def test_a_mode_is_chosen_only_where_nothing_says_one(
    mode: str | None, key: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        is_main_process, trackers = True, list[Any]()
        project_configuration = type("Projects", (), {})()

        def init_trackers(self, name: str, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None:
            assert init_kwargs["wandb"] == {"dir": str(tmp_path / "runs" / "small" / "logs")}

    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", mode or "")  # noted as unset, so that what `begin` sets is taken back behind the test
    if mode is None:
        monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("TRACKIO_DIR", "mine")
    recipe = load_recipe(str(write_run(tmp_path)), ["train.trackers=[wandb]"])
    with trackers.tracked(recipe, Silent(), 0):  # type: ignore[arg-type]
        pass
    assert os.environ.get("WANDB_MODE") == found
