"""Answers: made in batches, resumed after a kill with the same bytes, refused where they belong to another target."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.distill.rollout import Answer
from draftsmith.distill.served.target import ServedTarget
from draftsmith.recipes import load_recipe, read_prompts
from draftsmith.specdec.models import chat_ids, load
from draftsmith.specdec.places import revision
from draftsmith.train.data.chats import of_answers
from draftsmith.train.data.prepare import identity, manifest, prepare, prepare_served, read_answers, served_revision, write_answers
from draftsmith.train.rows import answers, run_prepare
from runs import draftsmith, kill_when, write_run
from stub_server import Reply, Stub
from tiny import plain_greedy


def test_answers_are_the_targets_own_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(write_run(tmp_path, prompts=6))
    target, tokenizer = load(recipe.target.model)
    prompts = read_prompts(recipe.data.prompts)
    prompts[0] = prompts[0]._replace(turns=["first", "second"])
    about = manifest(recipe.data, prompts, "t", revision(recipe.target.model), tokenizer, 0)
    rows = prepare(tmp_path / "a.jsonl", about, recipe.data, prompts, target, tokenizer)
    assert [(row["prompt"], row["turn"]) for row in rows] == [("p0", 0), ("p0", 1), *((f"p{i}", 0) for i in range(1, 6))]
    assert rows[1]["messages"][1] == {"role": "assistant", "content": rows[0]["answer"]}
    for row in rows:
        assert row["answer_ids"] == plain_greedy(target, chat_ids(tokenizer, row["messages"]), 24, frozenset([2]))
        assert row["finished"] == (row["answer_ids"][-1] == 2)
    told = json.loads((tmp_path / "a.jsonl.json").read_text())
    assert told["finished"] + told["cut_off"] == told["answers"] == 7
    assert f"{told['cut_off']} were cut off at 24" in capsys.readouterr().out
    path, mine = tmp_path / "a.jsonl", identity(about["revision"], tokenizer)
    assert read_answers(path, mine) == read_answers(path, about) == rows
    with pytest.raises(ValueError, match="A draft learns what its own target says"):
        read_answers(path, identity("sha256:other", tokenizer))
    with pytest.raises(ValueError, match="max_new_tokens is 24 there and 25 here"):
        read_answers(path, about | {"max_new_tokens": 25})
    tokenizer.chat_template += " "
    with pytest.raises(ValueError, match="chat_template"):
        read_answers(path, identity(about["revision"], tokenizer))
    path.write_text('{"prompt": "p0"}\n')
    with pytest.raises(ValueError, match="line 1: an answer needs answer_ids, messages"):
        read_answers(path, mine)
    (tmp_path / "a.jsonl.json").unlink()
    with pytest.raises(FileNotFoundError, match="nothing says which target"):
        read_answers(path, mine)


def test_a_template_that_refuses_a_role_is_named(tmp_path: Path) -> None:
    tokenizer = load(load_recipe(write_run(tmp_path)).target.model).tokenizer
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    with pytest.raises(ValueError, match=r"refuses a chat of system, user: System role not supported"):
        chat_ids(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


def test_killed_and_repeated_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    recipe = write_run(tmp_path)
    undisturbed, killed = tmp_path / "undisturbed.jsonl", tmp_path / "killed.jsonl"
    assert draftsmith("prepare", recipe, "--out", undisturbed).returncode == 0
    partial = killed.with_name(killed.name + ".partial")
    for batches in (1, 3):  # two kills, each in the middle of a batch
        kill_when(
            lambda batches=batches: partial.is_file() and partial.read_bytes().count(b"\n") > batches,
            "prepare",
            recipe,
            "--out",
            killed,
        )
        assert not killed.exists()
    partial.write_bytes(partial.read_bytes() + b'{"batch": 5, "rows": [{"promp')  # what a kill in a write leaves
    other = draftsmith("prepare", recipe, "--out", killed, "data.max_new_tokens=25")
    assert other.returncode == 2
    assert "another max_new_tokens" in other.stderr
    done = draftsmith("prepare", recipe, "--out", killed)
    assert done.returncode == 0, done.stderr
    assert killed.read_bytes() == undisturbed.read_bytes()
    assert killed.with_name(killed.name + ".json").read_bytes() == undisturbed.with_name(undisturbed.name + ".json").read_bytes()
    assert not partial.exists()
    again = draftsmith("prepare", recipe, "--out", killed)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_a_served_target_answers_as_the_local_one_and_only_what_is_missing_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(write_run(tmp_path, prompts=10))
    target, tokenizer = load(recipe.target.model)
    prompts = read_prompts(recipe.data.prompts)
    prompts[0] = prompts[0]._replace(turns=["first", "second"])
    prompts[3] = prompts[3]._replace(history=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    here = manifest(recipe.data, prompts, "t", "local", tokenizer, 0)
    wanted = prepare(tmp_path / "local.jsonl", here, recipe.data, prompts, target, tokenizer)
    about = manifest(recipe.data, prompts, "tiny", served_revision("tiny", "v2"), tokenizer, 0)
    path = tmp_path / "served.jsonl"

    def call(stub: Stub) -> list[dict[str, object]]:
        server = ServedTarget(stub.url, "tiny", concurrency=3, retries=0, sleep=lambda _: None)
        return prepare_served(path, about, recipe.data, prompts, server, recipe.target.model, tokenizer)

    # The second turn of a prompt whose first one is answered, and a prompt among others of its batch.
    ids = {(row["prompt"], row["turn"]): chat_ids(tokenizer, row["messages"]) for row in wanted}
    bad = {"p0": ids["p0", 1], "p5": ids["p5", 0]}
    with Stub(target, tokenizer) as stub:
        stub.fault = lambda number, body: Reply(400, {"message": "no"}) if body["prompt"] in bad.values() else None
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"^prompt p\d: http://127.*: 400: no.* answers are kept in .*partial; the same"
            ) as one:
                call(stub)
            lines = (tmp_path / "served.jsonl.partial").read_text().splitlines()
            kept = sum(len(json.loads(line)["rows"]) for line in lines[1:])
            assert f" {kept} answers are kept" in str(one.value)
            del bad[str(one.value)[7:9]]
        assert not bad
    with Stub(target, tokenizer) as elsewhere:  # where the target is served is not what it is
        assert call(elsewhere) == wanted
    asked = Counter(
        str(one["prompt"]) for one in stub.completions() + elsewhere.completions() if not isinstance(one["prompt"], str)
    )
    again = [("p0", 0), ("p0", 1), ("p5", 0)]
    assert asked == Counter([str(one) for one in ids.values()] + [str(ids[row]) for row in again])
    assert path.read_bytes() == (tmp_path / "local.jsonl").read_bytes()
    told = path.with_name(path.name + ".json").read_text()
    assert "127.0.0.1" not in told
    assert json.loads(told) == about | {key: json.loads(told)[key] for key in ("answers", "tokens", "finished", "cut_off")}
    assert read_answers(path, identity(served_revision("tiny", "v2"), tokenizer)) == wanted
    with pytest.raises(ValueError, match="revision is served:tiny@v2 there and served:tiny@unknown here"):
        read_answers(path, identity(served_revision("tiny", None), tokenizer))


def test_what_a_server_answered_is_shown_without_a_weight_of_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, prompts=4)
    target, tokenizer = load(str(tmp_path / "target"))
    for weights in (tmp_path / "target").glob("*.safetensors"):
        weights.unlink()
    with Stub(target, tokenizer) as stub:
        recipe = load_recipe(path, [f"server.url={stub.url}", "server.model=tiny", "server.revision=v2"])
        run_prepare(recipe, None, 0)
        with pytest.raises(FileExistsError, match="give another --out"):
            run_prepare(recipe, None, 0)
    capsys.readouterr()
    run_prepare(recipe, None, 1)  # read, with nobody to ask
    assert "scored text stands between [[ and ]]" in capsys.readouterr().out
    assert answers(recipe, None, tokenizer, "") == of_answers(
        read_answers(recipe.folder / "answers.jsonl", identity(served_revision("tiny", "v2"), tokenizer))
    )


def test_an_interrupt_in_the_middle_loses_one_batch(tmp_path: Path) -> None:
    recipe = load_recipe(write_run(tmp_path, prompts=12))  # three batches of four
    prompts = read_prompts(recipe.data.prompts)
    about = manifest(recipe.data, prompts, "t", "r", load(recipe.target.model).tokenizer, 0)
    asked: list[int] = []

    def answerer(chats: list[list[dict[str, str]]]) -> list[Answer]:
        asked.append(len(chats))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [Answer([7, 2], chat[-1]["content"], True) for chat in chats]

    with pytest.raises(KeyboardInterrupt):
        write_answers(tmp_path / "a.jsonl", about, recipe.data, prompts, answerer)
    rows = write_answers(tmp_path / "a.jsonl", about, recipe.data, prompts, answerer)
    assert asked == [4, 4, 4, 4]
    assert [row["answer"] for row in rows] == [prompt.turns[-1] for prompt in prompts]
