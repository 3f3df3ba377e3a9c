"""Answers in one file or several: each file is checked as one is, and no prompt is both learned and held out, whoever answered it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes import Recipe, load_recipe
from draftsmith.train.data.plan import to_rows
from draftsmith.train.data.prepare import identity
from draftsmith.train.rows import answers
from runs import write_run
from tiny import tiny_tokenizer


def written(path: Path, seed: int, name: str = "p{}", revision: str = "sha256:one") -> Path:
    """Answers to 20 prompts of one to three turns, each with its prompt's number in its first id and the seed in its second."""
    lines = []
    for prompt in range(20):
        chat: list[dict[str, str]] = []
        for turn in range(1 + prompt % 3):
            chat = [*chat, {"role": "user", "content": f"{prompt} {turn}"}]
            row = {"prompt": name.format(prompt), "turn": turn, "messages": chat, "answer_ids": [70 + prompt, 90 + seed, 2]}
            lines.append(row)
            chat = [*chat, {"role": "assistant", "content": f"seed {seed}"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.with_name(path.name + ".json").write_text(json.dumps(identity(revision, tiny_tokenizer())))
    return path


def recipe(place: Path, *files: Path) -> Recipe:
    return load_recipe(write_run(place), ["data.answers=" + json.dumps(list(map(str, files)))])


def test_no_prompt_of_several_files_is_learned_and_held_out_and_every_answer_is_a_row(tmp_path: Path) -> None:
    """The second file calls the prompts by the same names, the third by others, one of which is another prompt's in the first."""
    files = [written(tmp_path / f"{seed}.jsonl", seed, name) for seed, name in enumerate(("p{}", "p{}", "p1{}"))]
    tokenizer: Any = tiny_tokenizer()
    chats = answers(recipe(tmp_path, *files), None, tokenizer, "sha256:one")
    assert len(chats) == 60
    for draw in range(3):
        rows = to_rows(chats, tokenizer, 500, 0.2, draw)
        held, learned = ({row.answers[0] for row in some} for some in (rows.held_out, rows.train))
        assert held
        assert not held & learned
        said = Counter(one for row in rows.held_out + rows.train for one in row.answers if one >= 90)
        assert said == {90 + seed: 39 for seed in range(3)}
        assert len(to_rows(chats, tokenizer, 500, 0.2, draw, most=7).train) == 7, "data.rows counts answers, not prompts"


def test_one_file_is_split_as_it_was_by_the_names_of_its_prompts(tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    one = answers(recipe(tmp_path, written(tmp_path / "a.jsonl", 0)), None, tokenizer, "sha256:one")
    assert {row.answers[0] - 70 for row in to_rows(one, tokenizer, 500, 0.2, 3).held_out} == {0, 10, 14, 17}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: written(path, 1, revision="sha256:two"), r"b\.jsonl does not fit this run: revision is sha256:two there"),
        (lambda path: path.with_name("b.jsonl.json").unlink(), r"b\.jsonl has no b\.jsonl\.json beside it"),
        (lambda path: path.write_text('{"prompt": "p"}\n'), r"b\.jsonl, line 1: an answer needs answer_ids, messages"),
        (lambda path: path.unlink(), r"b\.jsonl does not exist"),
    ],
)
def test_each_file_is_checked_and_named(spoil: Any, why: str, tmp_path: Path) -> None:
    files = [written(tmp_path / f"{name}.jsonl", 0) for name in "ab"]
    spoil(files[1])
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        answers(recipe(tmp_path, *files), None, tiny_tokenizer(), "sha256:one")


def test_a_recipe_names_a_file_or_several_each_once(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert load_recipe(path).data.answer_files == []
    assert load_recipe(path, ["data.answers=a"]).data.answer_files == ["a"]
    assert load_recipe(path, ["data.answers=[a, b]"]).data.answer_files == ["a", "b"]
    for wrong, problem in {
        "[a, a]": "data.answers: value error, each at most once",
        "[]": "data.answers: list should have at least 1 item",
        "[{a: 1}]": "data.answers.0: input should be a valid string",
    }.items():
        with pytest.raises(ValueError, match=problem):
            load_recipe(path, [f"data.answers={wrong}"])
