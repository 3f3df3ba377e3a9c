"""Prompts: the three shapes of a record, every broken line named, and what ships is what the README says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.recipes import read_prompts

KINDS = {"code", "math", "chat", "summarise", "extract", "translate", "context", "creative"}


def write(path: Path, *records: object) -> str:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return str(path)


def test_the_shapes_of_a_record(tmp_path: Path) -> None:
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "given"}]
    name = write(
        tmp_path / "p.jsonl", {"prompt": "one"}, {"id": 7, "category": "x", "turns": ["two", "three"]}, {"messages": told},
        {"messages": [*told, {"role": "user", "content": "b"}], "prompt": "as chat sets have it", "turns": None}, {"id": 0, "prompt": "five"},
    )  # fmt: skip
    one, two, three, four, five = read_prompts(name)
    assert (five.id, three.id) == ("0", "line 3")
    assert (one.id, one.category, one.turns) == ("line 1", "all", ["one"])
    assert (two.id, two.category, two.turns) == ("7", "x", ["two", "three"])
    assert (three.history, three.turns) == (told[:1], ["a"]), "a given last answer is to be the target's own"
    assert (four.history, four.turns) == (told, ["b"])


def test_a_folder_of_data_files_and_a_name_that_no_hub_here_knows(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", {"prompt": "one"}, {"prompt": "two"})
    assert [prompt.turns for prompt in read_prompts(str(tmp_path / "set"))] == [["one"], ["two"]]
    with pytest.raises(ValueError, match="nobody/no-such-set is no file here, and datasets cannot load it"):
        read_prompts("nobody/no-such-set")


def test_a_broken_line_17_is_named_and_so_is_all_else_that_is_wrong(tmp_path: Path) -> None:
    records: list[object] = [{"prompt": f"p{i}"} for i in range(20)]
    records[16] = '{"prompt": "unfinished'
    records[3] = {"prompt": "  "}
    records[5] = {"text": "x"}
    records[7] = {"turns": [1]}
    records[8] = {"id": "line 1", "prompt": "x"}
    records[9] = "[1]"
    records[12] = '{"prompt": "half \\ud800"}'
    records[10] = {"messages": [{"role": "assistant", "content": "x"}]}
    with pytest.raises(ValueError, match="8 of 20 records") as error:
        read_prompts(write(tmp_path / "p.jsonl", *records))
    for wanted in (
        "line 17: not JSON",
        "line 4: the prompt is empty",
        "line 6: one of prompt, turns or messages",
        "line 9: id 'line 1' was used in line 1",
        "line 11: messages hold no user turn",
        "line 13: the text holds half a character",
    ):
        assert wanted in str(error.value)
    (tmp_path / "latin").write_bytes('{"prompt": "caf\xe9"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin: 1 of 1 records.*\n.*line 1: not UTF-8"):
        read_prompts(str(tmp_path / "latin"))
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(FileNotFoundError, match="looked in"):
        read_prompts(str(tmp_path / "gone.jsonl"))


def test_the_prompts_that_ship() -> None:
    train, evaluation = (read_prompts(f"recipes/data/{name}.jsonl") for name in ("train", "eval"))
    assert len(train) >= 480
    assert len(evaluation) >= 96
    counts = Counter(prompt.category for prompt in evaluation)
    assert counts.keys() == KINDS == {prompt.category for prompt in train}
    assert min(counts.values()) >= 12

    def plain(text: str) -> str:
        return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())

    seen = {plain(turn) for prompt in train for turn in prompt.turns}
    assert len(seen) == len(train)
    assert not seen & {plain(turn) for prompt in evaluation for turn in prompt.turns}


def test_the_answers_that_ship_belong_to_the_prompts_that_ship() -> None:
    from draftsmith.recipes.paths import find
    from draftsmith.recipes.prompts import read_jsonl

    path = find("recipes/data/smollm2-135m.jsonl")
    rows, about = read_jsonl(path), json.loads(path.with_name(path.name + ".json").read_text())
    assert {row["prompt"] for row in rows} == {prompt.id for prompt in read_prompts("recipes/data/train.jsonl")}
    assert about["answers"] == len(rows)
    assert about["tokens"] == sum(len(row["answer_ids"]) for row in rows)
    assert about["finished"] + about["cut_off"] == len(rows)
    assert all((row["answer_ids"][-1] == 2) == row["finished"] for row in rows)


# The first lines of the sets that evaluations are run on, in their form and with other words.
SETS = {
    "gsm8k": {
        "id": "gsm8k-0",
        "category": "math",
        "turns": ["A hen lays 3 eggs.\nReason step by step, and put the answer within \\boxed{}."],
    },
    "humaneval": {
        "id": "humaneval-0",
        "category": "code",
        "turns": ['Write:\n```python\ndef f(x: float) -> bool:\n    """ >>> f(1.0)\n```'],
    },
    "math500": {"id": "math500-0", "category": "math", "turns": ["Convert $(0,3)$ to $(r,\\theta)$, $0 \\le \\theta < 2 \\pi.$"]},
    "mt-bench": {"id": "mt-bench-0", "category": "chat", "turns": ["Write a post.", "Rewrite it."]},
    "spec_bench": {"id": "spec-bench-81", "category": "writing", "turns": ["Write of Curaçao.", "Begin each line with A."]},
    "train_prompts": {"id": 0, "category": "code", "source": "mbpp", "turns": ["Write a function."]},
    "responses": {"category": "code", "source": "mbpp", "turns": ["Write a function."], "response": "def f(): ..."},
}


@pytest.mark.parametrize("name", SETS)
def test_the_known_sets_load(name: str, tmp_path: Path) -> None:
    line = SETS[name]
    (prompt,) = read_prompts(write(tmp_path / f"{name}.jsonl", line))
    assert prompt == (str(line.get("id", "line 1")), line["category"], [], line["turns"])
