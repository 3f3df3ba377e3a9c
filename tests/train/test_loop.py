"""The one division: loss and gradient do not hang on how rows are split; the plan is a function of seed and step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.distill import CutDraft, DistillDraft, Loss, collate
from draftsmith.recipes.schema import Train
from draftsmith.train.data.plan import Plan, micro_batches, to_rows
from draftsmith.train.loop import Record, evaluate, gradient, learning_rate, train
from runs import launched
from tiny import noisy, tiny, tiny_tokenizer

# Lengths that make a mean of means visibly wrong: 1, 9, 2, 6 and 14 scored tokens.
ROWS = [([5, 9, 11, 4], 3), ([7, *range(20, 29)], 1), ([3, 3, 20, 21], 2), ([8, *range(30, 37)], 2), ([6, *range(40, 55)], 2)]


def norm_of(objective: DistillDraft) -> float:
    return float(torch.nn.utils.get_total_norm([one.grad for one in objective.trainable.parameters() if one.grad is not None]))


def split(pieces: list[list[int]]) -> tuple[dict[str, float], float, list[torch.Tensor]]:
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    accelerator = Accelerator(cpu=True)
    sums = gradient(objective, [collate([ROWS[i] for i in piece], pad=piece[0]) for piece in pieces], accelerator)
    return sums, norm_of(objective), [one.grad for one in objective.trainable.parameters() if one.grad is not None]


@pytest.mark.parametrize("pieces", [[[0], [1], [2], [3], [4]], [[0, 1, 2, 3], [4]], [[3, 1], [0, 4, 2]]])
def test_loss_and_gradient_norm_do_not_hang_on_the_split(pieces: list[list[int]]) -> None:
    whole, norm, slopes = split([[0, 1, 2, 3, 4]])
    sums, other_norm, others = split(pieces)
    assert whole["scored"] == sums["scored"] == 32
    assert math.isclose(whole["loss"], sums["loss"], rel_tol=1e-5)
    assert math.isclose(norm, other_norm, rel_tol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(slopes, others, strict=True))


def test_an_idle_micro_batch_adds_nothing() -> None:
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    accelerator = Accelerator(cpu=True)
    assert gradient(objective, micro_batches(ROWS[:1], 4, 0, 1), accelerator)["scored"] == 1
    norm = norm_of(objective)
    objective.trainable.zero_grad()
    gradient(objective, [collate(ROWS[:1])], accelerator)
    assert math.isclose(norm, norm_of(objective), rel_tol=1e-5)


def test_micro_batches_share_a_step_among_processes_without_loss() -> None:
    for world, accumulate in ((1, 1), (2, 2), (3, 1), (8, 1)):
        batches = [micro_batches(ROWS, accumulate, rank, world) for rank in range(world)]
        assert {len(one) for one in batches} == {accumulate}
        assert sum(int(batch.scored.sum()) for one in batches for batch in one) == 32


def test_every_row_is_seen_once_an_epoch_and_a_step_is_found_again() -> None:
    rows = [([i] * (i % 7 + 2), 1) for i in range(53)]
    plan = Plan(rows, size=8, epochs=3, seed=1)
    steps = [plan.step(number) for number in range(plan.steps)]
    assert plan.steps == 21
    for epoch in range(3):
        seen = [row[0][0] for step in steps[7 * epoch : 7 * epoch + 7] for row in step]
        assert sorted(seen) == list(range(53))
    assert steps[0] != steps[7]
    assert Plan(rows, size=8, epochs=3, seed=1).step(15) == steps[15]
    assert Plan(rows, size=8, epochs=3, seed=2).step(15) != steps[15]


def test_rows_keep_the_very_ids_and_whole_prompts_are_held_out() -> None:
    tokenizer = tiny_tokenizer()
    answers = [
        {
            "prompt": f"p{i}",
            "turn": turn,
            "messages": [{"role": "user", "content": "hi " * (i + 1)}],
            "answer_ids": [65, 66, 2] if i else [],
        }
        for i in range(20)
        for turn in range(2)
    ]
    rows = to_rows(answers, tokenizer, max_length=48, held_out=0.2, seed=0)
    assert rows.left_out["empty answer"] == 2
    assert rows.left_out["longer than max_length"] > 0
    assert all(row.answers == [65, 66, 2] for row in rows.train)
    assert tokenizer.decode(rows.train[0].ids[: rows.train[0].spans[0][0]]).endswith("</s><s>a:")
    assert not {tuple(ids) for ids, _ in rows.train} & {tuple(ids) for ids, _ in rows.held_out}
    with pytest.raises(ValueError, match="rows to train on"):
        to_rows(answers, tokenizer, max_length=5, held_out=0.2, seed=0)


def test_the_learning_rate_rises_falls_and_never_ends_below_its_share() -> None:
    settings = Train(learning_rate=1.0, warmup=0.1, final_learning_rate=0.05)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates[9] == 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert math.isclose(rates[-1], 0.05)
    assert learning_rate(0, 1, settings) == 1.0


def test_the_loop_learns_and_records_means() -> None:
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=1.0)
    records: list[Record] = []
    settings = Train(learning_rate=5e-3)
    train(
        objective, optimizer, lambda step: micro_batches(ROWS, 2, 0, 1), start=0, steps=15, settings=settings, accelerator=accelerator, after=records.append
    )  # fmt: skip
    assert [record.step for record in records] == list(range(1, 16))
    assert records[-1].loss < 0.7 * records[0].loss
    assert records[-1].acceptance > records[0].acceptance
    held_out = evaluate(objective, [collate(ROWS)], accelerator)
    assert held_out["scored"] == 32
    assert held_out["loss"] < records[-1].loss


def test_a_loss_that_is_not_finite_stops_with_its_step_and_leaves_the_weights() -> None:
    target = tiny()
    objective = DistillDraft(noisy(target), target)
    before = [one.clone() for one in objective.trainable.parameters()]

    def broken(batch: object) -> Loss:
        return Loss(
            sum(one.sum() for one in objective.trainable.parameters()) * float("nan"),
            {name: torch.tensor(1.0) for name in ("acceptance", "agreement", "scored")},
        )

    objective.loss = broken  # type: ignore[method-assign, assignment]
    optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="step 4: loss nan"):
        train(
            objective,
            optimizer,
            lambda step: [collate(ROWS)],
            start=3,
            steps=9,
            settings=Train(),
            accelerator=Accelerator(cpu=True),
        )
    assert all(torch.equal(a, b) for a, b in zip(before, objective.trainable.parameters(), strict=True))


def test_two_processes_get_the_gradient_of_one(tmp_path: Path) -> None:
    """Gradients over gloo, uneven token counts and a process without a row, against one process."""
    script = tmp_path / "two.py"
    script.write_text(
        f"""
import sys, json, torch
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tiny import tiny
from draftsmith.distill import CutDraft, DistillDraft
from draftsmith.train.data.plan import micro_batches
from draftsmith.train.launch import launched, leave
from draftsmith.train.loop import gradient
torch.set_num_threads(1)
rows = {ROWS!r}
with launched("no") as accelerator:
    for some in (rows, rows[:1]):
        target = tiny()
        objective = DistillDraft(CutDraft(target, [0, 1]), target)
        objective.trainable = accelerator.prepare(objective.trainable)
        sums = gradient(objective, micro_batches(some, 2, accelerator.process_index, accelerator.num_processes), accelerator)
        norm = float(torch.nn.utils.get_total_norm([one.grad for one in objective.trainable.parameters()]))
        if accelerator.is_main_process:
            print(json.dumps([accelerator.num_processes, sums["loss"], sums["scored"], norm]), flush=True)
leave(0)
"""
    )
    lines = {}
    for processes in (1, 2):
        said = launched(processes, script).stdout.splitlines()
        lines[processes] = [json.loads(line) for line in said if line.startswith("[")]
    for one, two in zip(lines[1], lines[2], strict=True):
        assert (one[0], two[0]) == (1, 2)
        assert one[2] == two[2]
        assert math.isclose(one[1], two[1], rel_tol=1e-5)
        assert math.isclose(one[3], two[3], rel_tol=1e-5)
