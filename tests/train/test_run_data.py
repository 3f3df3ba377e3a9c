"""Runs on whole chats: packed, split and streamed, gone on with exactly, and shown before anything is learned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftsmith.recipes import runs
from runs import chats, draftsmith, launched, options, write_run


def weights(run: Path) -> bytes:
    return (runs.steps(run)[-1] / "draft" / "model.safetensors").read_bytes()


def test_packed_chats_with_long_ones_split_train_and_are_counted(tmp_path: Path) -> None:
    recipe = chats(tmp_path)
    done = draftsmith("train", recipe, *options(tmp_path, "data.pack=128", "data.long=split", "data.workers=2"))
    assert done.returncode == 0, done.stderr
    assert "scored tokens that are not the target's own words" in done.stdout
    assert "1 rows that were split" in done.stdout
    run = tmp_path / "runs" / "small"
    about = json.loads((run / "environment.json").read_text())
    assert about["counted"]["turns"] == 80
    assert list((run / "rows").iterdir())


def test_a_stream_that_is_cut_goes_on_with_the_same_bits_on_one_process_or_two(tmp_path: Path) -> None:
    recipe = chats(tmp_path)
    more = options(tmp_path, "data.stream=16", "train.steps=12", "train.save_every=4")
    whole = draftsmith("train", recipe, "name=whole", *more)
    assert whole.returncode == 0, whole.stderr
    assert draftsmith("train", recipe, "name=cut", *more).returncode == 0
    run = tmp_path / "runs" / "cut"
    shutil.rmtree(runs.steps(run)[-1])
    assert runs.state(runs.steps(run)[-1])["plan"]["at"]["source"] is not None
    two = tmp_path / "runs" / "two"
    shutil.copytree(run, two)
    assert draftsmith("train", recipe, "name=cut", *more).returncode == 0
    assert weights(run) == weights(tmp_path / "runs" / "whole")
    (two / "recipe.yaml").write_text((two / "recipe.yaml").read_text().replace("name: cut", "name: two"))
    launched(2, "-m", "draftsmith.train", recipe, "name=two", *more)
    counts = [
        [
            (line["step"], line["scored"])
            for line in map(json.loads, (one / "metrics.jsonl").read_text().splitlines())
            if "scored" in line
        ]
        for one in (two, run)
    ]
    assert counts[0] == counts[1], "the same rows at the same steps"


def test_a_row_is_shown_with_its_mask(tmp_path: Path) -> None:
    recipe = chats(tmp_path)
    done = draftsmith("prepare", recipe, "--show", "1", *options(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<s>u:amber 0</s><s>a:[[amber</s>]]<s>u:more</s><s>a:[[amber</s>]]\n")
    assert "prepare --out" not in done.stdout
    assert draftsmith("prepare", recipe, *options(tmp_path)).returncode == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["data.format=messages"], "words says whose chats"),
        (["data.stream=8"], "go together"),
        (["data.stream=8", "train.steps=9"], "it needs data.format messages"),
        (
            ["data.stream=8", "train.steps=9", "data.format=messages", "data.words=target", "data.workers=2"],
            "leave data.workers out",
        ),
        (["data.pack=8"], "do not fit sequences"),
        (
            ["data.stream=8", "train.steps=9", "data.format=messages", "data.words=target", "train.teacher=stored"],
            "never all at hand",
        ),
        (["data.format=messages", "data.words=target", "data.answers=x"], "answers belong to prompts"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words: list[str], why: str, tmp_path: Path) -> None:
    from runs import inside

    done = inside("validate", write_run(tmp_path), *words)
    assert done.returncode == 2
    assert why in done.stderr
