"""The order of rows: packed or not, every row once an epoch, found again from a step's number whatever the number of processes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftsmith.distill import Batch
from draftsmith.distill.batch import Example
from draftsmith.train.data.chats import Form, Made, reader
from draftsmith.train.data.plan import Plan, micro_batches
from draftsmith.train.data.stream import Stream
from tiny import tiny_tokenizer

ROWS = [Example([i, *range(3, 4 + i % 13)], ((1, 2),)) for i in range(3000, 3203)]


def firsts(step: Any) -> list[int]:
    return [row.ids[0] for one in step for row in (one if isinstance(one, list) else [one])]


def seen(batches: list[Batch]) -> list[int]:
    return [int(ids[0]) for batch in batches for ids, scored in batch.rows() if scored.any()]


def test_packs_hold_every_row_once_an_epoch_and_hang_on_seed_and_epoch_alone() -> None:
    plan = Plan(ROWS, 4, 3, 1, pack=24)
    steps = [plan.step(number) for number in range(plan.steps)]
    tokens = sum(len(row.ids) for row in ROWS)
    at, epochs = 0, []
    for _ in range(3):
        start, found = at, Counter[int]()
        while sum(found.values()) < len(ROWS):
            found.update(firsts(steps[at]))
            at += 1
        assert found == Counter(row.ids[0] for row in ROWS)
        epochs.append(steps[start:at])
    assert at == plan.steps
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        packs = [pack for step in epoch for pack in step]
        assert all(isinstance(pack, list) and sum(len(row.ids) for row in pack) <= 24 for pack in packs)
        assert len(packs) * 24 < 1.1 * tokens, "first fit leaves little room"
        assert all(len(step) == 4 for step in epoch[:-1])
    again = Plan(ROWS, 4, 3, 1, pack=24)
    assert again.step(plan.steps - 1) == steps[-1]
    assert again.step(5) == steps[5]
    assert Plan(ROWS, 4, 3, 2, pack=24).step(0) != steps[0]


def test_a_plan_is_told_apart_by_all_it_hangs_on() -> None:
    plans = [Plan(ROWS, 4, 1, 1), Plan(ROWS, 4, 1, 2), Plan(ROWS, 5, 1, 1), Plan(ROWS, 4, 1, 1, pack=24), Plan(ROWS[1:], 4, 1, 1)]
    assert len({plan.fingerprint for plan in plans}) == 5
    assert plans[0].fingerprint == Plan(ROWS, 4, 1, 1).fingerprint
    assert plans[0].state() == {}


def test_a_row_that_fits_no_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="sequences of 8 tokens, and one has 14"):
        Plan(ROWS, 4, 1, 1, pack=8)


def test_steps_of_like_length_waste_little() -> None:
    def padding(steps: list[Any]) -> int:
        return sum(max(len(row.ids) for row in step) * len(step) - sum(len(row.ids) for row in step) for step in steps)

    plan = Plan(ROWS, 4, 1, 1)
    assert 4 * padding([plan.step(number) for number in range(plan.steps)]) < padding(
        [ROWS[at : at + 4] for at in range(0, 200, 4)]
    )


@pytest.mark.parametrize("pack", [0, 24])
def test_the_place_is_kept_when_the_number_of_processes_changes(pack: int) -> None:
    """Steps 0 to 6 on four processes, then two, then three: every row is seen once in the epoch, by one of them."""
    plan = Plan(ROWS, 8, 1, 1, pack)
    found: list[int] = []
    for number in range(plan.steps):
        world = 4 if number < 7 else 2 if number < 10 else 3
        plan = plan if number not in (7, 10) else Plan(ROWS, 8, 1, 1, pack)  # another process
        shares = [micro_batches(plan.step(number), 2, rank, world) for rank in range(world)]
        assert {len(share) for share in shares} == {2}
        found += [one for share in shares for one in seen(share)]
    assert sorted(found) == [row.ids[0] for row in ROWS]


def files(place: Path, kind: str) -> list[Path]:
    from datasets import Dataset

    found = []
    for number, (start, end) in enumerate(((0, 31), (31, 32), (32, 80))):
        records = [{"n": one, "text": "x" * (one % 7)} for one in range(start, end)]
        found.append(place / f"part-{number}.{kind}")
        if kind == "parquet":
            Dataset.from_list(records).to_parquet(str(found[-1]))
        else:
            found[-1].write_text("".join(json.dumps(one) + "\n" for one in records))
    return found


def read(record: dict[str, Any]) -> Made:
    """One row of a record, two of every tenth, none of every eleventh."""
    n = record["n"]
    if n % 11 == 0:
        return Made([], Counter({"every eleventh": 1}), Counter())
    return Made([Example([n, *range(n % 7), 1], ((1, 2),))] * (1 + (n % 10 == 0)), Counter(), Counter({"read": 1}))


@pytest.mark.parametrize("pack", [0, 20])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stream_goes_on_exactly_from_its_state(kind: str, pack: int, tmp_path: Path) -> None:
    made: list[int] = []

    def counting(record: dict[str, Any]) -> Made:
        made.append(record["n"])
        return read(record)

    def stream() -> Stream:
        return Stream(files(tmp_path, kind), counting, 4, 200, 1, block=16, pack=pack)

    first = stream()
    steps, states = [], []
    for number in range(60):
        steps.append(first.step(number))
        states.append(json.dumps(first.state()))
    for number in (0, 3, 4, 9, 20, 33, 58):
        other = stream()
        other.go_to(json.loads(states[number]))
        made.clear()
        assert [other.step(at) for at in range(number, 60)] == steps[number:]
        if number == 58:
            assert len(made) <= 2 * 16, "only the block at hand is read again"
    assert first.step(2) == steps[2], "an earlier step is found again"
    assert stream().step(33) == steps[33], "and a later one without a state"
    wanted = Counter(row.ids[0] for one in range(80) for row in read({"n": one}).rows)
    found, at = Counter[int](), 0
    for _ in range(2):
        epoch = Counter[int]()
        while epoch != wanted:
            epoch.update(firsts(steps[at]))
            assert epoch <= wanted, "no row twice before all were seen"
            at += 1
        found += epoch
    assert found == wanted + wanted
    assert [firsts(step) for step in steps[: at // 2]] != [firsts(step) for step in steps[at // 2 : at]]


def test_a_stream_keeps_records_back_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    stream = Stream(files(tmp_path, "jsonl"), read, 4, 200, 1, block=16, held_out=0.3)
    held = {row.ids[0] for row in stream.held_out(1000)}
    given = {one for number in range(40) for one in firsts(stream.step(number))}
    assert 8 < len(held) < 40
    assert held | given == {one for one in range(80) if one % 11}
    assert not held & given
    assert [row.ids[0] for row in stream.held_out(3)] == [row.ids[0] for row in stream.held_out(1000)][:3]
    assert stream.left_out["every eleventh"] > 0
    assert stream.counted["read"] > 0


def test_a_stream_reads_chats_and_answers_and_keeps_a_prompt_on_one_side(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path, form = tmp_path / "a.jsonl", Form(500)
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (talk, talk[:1], [])))
    stream = Stream([path], reader(tokenizer, form), 4, 9, 1)
    (row,) = stream.step(0)
    assert isinstance(row, Example)
    assert tokenizer.decode(row.answers) == "yo</s>"
    assert stream.left_out == {"chat without an assistant's turn": 2}
    path.write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "y", "messages": talk}) + "\n")
    stream = Stream([path], reader(tokenizer, form), 4, 9, 1)
    assert len(stream.step(0)) == 1
    ((why, count),) = stream.left_out.items()
    assert count == 1
    assert why.startswith("broken record: messages must be")
    answers = [
        {"prompt": f"p{i % 20}", "messages": [{**talk[0], "content": str(i % 20)}], "answer_ids": [70, i + 80, 2]}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in answers))
    stream = Stream([path], reader(tokenizer, form), 60, 9, 1, held_out=0.3)
    held, given = ({one.ids[-2] % 20 for one in rows} for rows in (stream.held_out(100), stream.step(0)))  # type: ignore[union-attr]
    assert held
    assert given
    assert not held & given
    chats = [[{"role": "user", "content": f"{i % 20}"}, {"role": "assistant", "content": f"{'abc'[i // 20]}"}] for i in range(60)]
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    stream = Stream([path], reader(tokenizer, form), 60, 9, 1, held_out=0.3)
    held, given = ({tuple(one.ids[: one.spans[0][0]]) for one in rows} for rows in (stream.held_out(100), stream.step(0)))  # type: ignore[union-attr]
    assert held
    assert given
    assert not held & given, "several answers to one prompt"


def test_a_stream_is_told_apart_by_its_files_and_settings_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    paths = files(tmp_path, "jsonl")
    names = {Stream(paths, read, 4, 9, 1, block=block, of=of).fingerprint for block in (16, 17) for of in ("a", "b")}
    paths[1].write_text(json.dumps({"n": 30, "text": "y"}) + "\n")
    assert len(names | {Stream(paths, read, 4, 9, 1, block=16, of="a").fingerprint}) == 5
    with pytest.raises(ValueError, match="files of one kind"):
        Stream([*paths, tmp_path / "x.parquet"], read, 4, 9, 1)
    with pytest.raises(ValueError, match=r"found none"):
        Stream([], read, 4, 9, 1)
    with pytest.raises(ValueError, match=r"leave no row to train on; left out: {'never': 80}"):
        Stream(paths, lambda record: Made([], Counter({"never": 1}), Counter()), 4, 9, 1, block=16).step(0)
