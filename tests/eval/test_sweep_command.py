"""`draftsmith sweep`: its files, going on after an interrupt, and what is refused before a model is loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.candidates import folder_of, layer_of
from draftsmith.eval.prediction.costs import Cost
from draftsmith.eval.sweep import run
from draftsmith.eval.sweep.asked import asked_of, every_layer
from draftsmith.eval.sweep.kept import Started, read_started, write_started
from draftsmith.eval.sweep.picture import draw, layer_axis
from draftsmith.recipes import load_recipe
from draftsmith.specdec.drafters.exit_files import write_exits
from draftsmith.specdec.drafters.exit_heads import make_head
from draftsmith.specdec.models import load_model
from exits import KINDS, LAST
from runs import inside, write_run
from tiny import tiny_folder

TEXTS = ("amber birch", "cedar 4", "ember fjord grove", "heron")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sweep")
    tiny_folder(home / "target", seed=2)
    lines = [{"id": f"p{i}", "turns": [text, "more"] if i == 1 else [text]} for i, text in enumerate(TEXTS)]
    (home / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return home


def words(place: Path, out: Path, *more: str) -> list[str]:
    fixed = ["sweep", "--target", str(place / "target"), "--prompts", str(place / "p.jsonl"), "--max-new-tokens", "8"]
    return [*fixed, "--out", str(out), "--k", "1", "3", *(more or ("--drafters", "exit:1,3"))]


def sweep(place: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return inside(*words(place, out, *more))


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    done = sweep(place, place / "out")
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place / "out"


def test_the_folder_says_what_to_do_and_how_it_was_found(finished: Path) -> None:
    found = json.loads((finished / "sweep.json").read_text())
    assert found["schema"] == 1
    assert [(one["drafter"], one["k"]) for one in found["cells"]] == [("exit:1", 1), ("exit:1", 3), ("exit:3", 1), ("exit:3", 3)]
    assert (found["prompts"], found["answers"]) == (4, 5)
    for cell in found["cells"]:
        assert cell["measured"]["equal"] == cell["measured"]["compared"] == 5
        assert cell["predicted"]["tokens_per_call"] == pytest.approx(cell["measured"]["tokens_per_call"], abs=1e-9)
        assert cell["predicted"]["alpha"] == (1 if cell["drafter"] == "exit:3" else pytest.approx(0, abs=0.5))
    page = (finished / "sweep.md").read_text()
    assert page.splitlines()[0] == f"**{found['recommendation']['text']}**"
    for word in (
        "| exit:3 | 3 |",
        "A plain step took",
        "1 thread",
        "4 of 4 prompts",
        "What the words mean",
        "Predicted over measured",
    ):
        assert word in page, word
    assert (finished / "sweep.png").read_bytes().startswith(b"\x89PNG")
    printed = (finished.parent / "stdout").read_text()
    assert printed.startswith(found["recommendation"]["text"])
    assert "sweep.md" in printed


def test_trained_exits_of_a_folder_and_a_lookup(place: Path, tmp_path: Path) -> None:
    target = load_model(place / "target")
    pairs = [(one, make_head(target, one)) for one in (KINDS["adapter"], LAST["full"])]
    write_exits(tmp_path / "heads", target, pairs, default=1)
    done = sweep(place, tmp_path / "out", "--drafters", f"{tmp_path / 'heads'}:1,3", "ngram", "--per-kind", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert found["drafters"] == [f"{tmp_path / 'heads'}:1", f"{tmp_path / 'heads'}:3", "ngram"]
    for cell in found["cells"]:
        assert cell["predicted"]["tokens_per_call"] == pytest.approx(cell["measured"]["tokens_per_call"], abs=1e-9)
    assert [one["predicted"]["alpha"] for one in found["cells"]][2:4] == [1, 1]  # an exit after the last layer
    assert found["recommendation"]["text"].startswith("Do not speculate on this evidence")
    with (tmp_path / "heads" / "drafter.json").open("a") as stream:
        stream.write("\n")  # as if they had been trained on
    done = sweep(place, tmp_path / "out", "--drafters", f"{tmp_path / 'heads'}:1,3", "ngram", "--per-kind", "1")
    assert done.returncode == 2
    assert "holds a sweep of another drafts {" in done.stderr


def test_an_interrupted_sweep_goes_on_and_keeps_what_was_done(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    real, written = run.write_done, []

    def write_two(*args: Any) -> None:
        real(*args)
        written.append(args)
        if len(written) == 2:
            interrupted()

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run, "write_done", write_two)
        stopped = sweep(place, out)
    assert stopped.returncode == 130
    assert "the same command goes on where it was" in stopped.stderr
    assert not (out / "sweep.json").exists()
    with (out / "prompts.jsonl").open("a") as stream:
        stream.write('{"prompt": "p2", "answ')  # what a kill can leave
    before = (out / "prompts.jsonl").read_text().splitlines()[:2]
    clocks = (out / "started.json").read_bytes()
    assert sweep(place, out).returncode == 0
    after = (out / "prompts.jsonl").read_text().splitlines()
    assert after[:2] == before
    assert [json.loads(one)["prompt"] for one in after] == ["p0", "p1", "p2", "p3"]
    assert (out / "started.json").read_bytes() == clocks


def test_a_finished_sweep_is_written_again_without_a_model(finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(run, "load", never)
    before = json.loads((finished / "sweep.json").read_text())
    assert sweep(place, finished).returncode == 0
    assert json.loads((finished / "sweep.json").read_text())["cells"] == before["cells"]
    fewer = sweep(place, finished, "--drafters", "exit:1,3", "--per-kind", "3")
    assert fewer.returncode == 0
    assert json.loads((finished / "sweep.json").read_text())["prompts"] == 3


def test_another_question_is_not_mixed_in(finished: Path, place: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "out")
    done = sweep(place, tmp_path / "out", "--drafters", "exit:1,3", "--temperature", "0.5")
    assert done.returncode == 2
    assert "holds a sweep of another temperature 0.0; give another --out, or remove it" in done.stderr
    lines = (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"digest": "another"}
    (tmp_path / "out" / "prompts.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    done = sweep(place, tmp_path / "out")
    assert done.returncode == 2
    assert "prompt p0 has changed since" in done.stderr


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--drafters", "exit:4"), "exit:4: the target has layers 1..3; name some of them, as in exit:1"),
        (("--drafters", "exit:0,1"), "exit:0: the target has layers 1..3"),
        (("--drafters", "ngram+exit:9"), "ngram+exit:9: the target has layers 1..3"),
        (("--drafters", "exit"), "exit: the target has layers"),
        (("--drafters", "ngram:x"), "ngram:x: ngram takes a whole number"),
        (("--drafters", "exot:3"), "did you mean exit?"),
        (("--drafters", "heads:3,6"), "heads:3: no folder heads here; train its exits first"),
        (("--drafters", "./nowhere/draft"), "does not exist"),
        (("--k", "0", "2"), "--k 0 2 asked; each is at least 1"),
        (("--k", "2", "2"), "name each block length once"),
        (("--max-new-tokens", "1"), "--max-new-tokens 1 asked; each is at least 2"),
        (("--decoding", "fast"), "--decoding fast asked; it is as_loaded or prepared"),
        (("--prompts", "missing.jsonl"), "missing.jsonl does not exist"),
        (("--target", "./missing"), "missing does not exist"),
        (("--temperature", "-1"), "temperature must be a finite number >= 0"),
    ],
)
def test_what_cannot_be_is_said_before_a_model_is_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], why: str
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(run, "load", never)
    done = sweep(place, tmp_path / "out", *more)
    assert done.returncode == 2
    assert why in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_draft_of_another_target_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "drafter.json").write_text('{"kind": "exits", "revision": "sha256:other"}')
    done = sweep(place, tmp_path / "out", "--drafters", f"{tmp_path / 'heads'}:1")
    assert done.returncode == 2
    assert "was made from a target of revision sha256:other" in done.stderr


def test_target_and_prompts_are_needed() -> None:
    done = inside("sweep", "--target", "x")
    assert done.returncode == 2
    assert "a sweep needs a recipe, or --target and --prompts; missing: --prompts" in done.stderr


def test_a_recipe_says_target_and_evaluation_and_options_change_them(tmp_path: Path) -> None:
    recipe = load_recipe(write_run(tmp_path), ["eval.seed=7"])
    asked = asked_of(recipe, {"k": [2], "per_kind": 1})
    assert (asked.target, asked.prompts) == (str(tmp_path / "target"), str(tmp_path / "eval.jsonl"))
    assert (asked.k, asked.per_kind, asked.seed, asked.max_new_tokens, asked.decoding) == ((2,), 1, 7, 12, "prepared")
    assert asked.out == str(recipe.folder / "sweep")
    assert asked.drafters == ("exit:1", "exit:2")  # through the first half of three layers


def test_overrides_of_a_recipe_go_behind_it(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    done = inside("sweep", path, "eval.nothing=1")
    assert done.returncode == 2
    assert "eval.nothing: no such key" in done.stderr
    done = inside("sweep", path, "--k", "0", "--drafters", "exit:1")
    assert "--k 0 asked" in done.stderr


def test_prompts_of_a_sweep_without_its_clocks_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "of another question"}\n')
    write_started(tmp_path, {"k": [1]}, Started(0.1, {"exit:1, k = 1": Cost(0.1, 1.2, 0.0, 1.0)}, ""))
    assert not (tmp_path / "prompts.jsonl").exists()
    assert read_started(tmp_path, {"k": [1]}) == Started(0.1, {"exit:1, k = 1": Cost(0.1, 1.2, 0.0, 1.0)}, "")


def test_the_picture_has_two_panels_on_one_scale_and_layers_in_their_order(tmp_path: Path) -> None:
    speeds = {("exit:6", 1): (0.91, 0.81), ("exit:6", 4): (0.92, 0.82), ("exit:3", 1): (1.41, 1.31), ("exit:3", 4): (1.42, 1.32)}
    cells = [
        {"drafter": drafter, "k": k, "predicted": {"speed_up": said}, "measured": {"speed_up": {"value": found}}}
        for (drafter, k), (said, found) in speeds.items()
    ]
    about = {"drafters": ["exit:6", "exit:3"], "k": [1, 4], "cells": cells, "recommendation": {"text": "Use exit:3. Chosen on the"}}
    draw(about, tmp_path / "sweep.svg")
    said = re.findall(r"<!-- (.*?) -->", (tmp_path / "sweep.svg").read_text())  # matplotlib writes each text beside its outlines
    assert [one for one in said if re.fullmatch(r"[01]\.\d\d", one) and one not in ("0.67", "0.95", "1.05", "1.25")] == [
        "1.41", "1.42", "0.91", "0.92", "1.31", "1.32", "0.81", "0.82",
    ]  # fmt: skip
    ticks = [one for one in said if one in ("1", "3", "4", "6")]
    assert ticks[:4] == ["1", "4", "3", "6"]
    for word in ("predicted; best 1.42", "measured; best 1.32", "exit after layer", "k, drafted tokens a round", "Use exit:3."):
        assert word in said, word
    assert said.count("speed-up over plain decoding") == 1


def test_names_of_several_layers() -> None:
    assert every_layer(("exit:3,6", "heads/x:1,2", "ngram:4", "exit:3", "gpt2")) == [
        "exit:3", "exit:6", "heads/x:1", "heads/x:2", "ngram:4", "gpt2",
    ]  # fmt: skip
    assert layer_of("heads/x:12") == ("heads/x", 12)
    assert layer_of("ngram:4") is None
    assert folder_of("ngram+heads/x:12") == "heads/x"


def test_only_exits_of_one_family_have_an_order() -> None:
    assert layer_axis(["exit:6", "exit:3"]) == [6, 3]
    assert layer_axis(["exit:6", "heads:3"]) is None
    assert layer_axis(["exit:6", "ngram"]) is None
