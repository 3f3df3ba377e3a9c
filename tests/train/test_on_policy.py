"""On policy: which rows a step sees is a function of seed and step, they are the draft's own, and a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.distill import CutDraft, DistillDraft
from draftsmith.distill.rollout import speaking, write_rows
from draftsmith.recipes.schema import Train
from draftsmith.specdec import Sampling
from draftsmith.train import checkpoint
from draftsmith.train.choice import Choice
from draftsmith.train.data.plan import Example, Plan, micro_batches
from draftsmith.train.loop import evaluate, train
from draftsmith.train.on_policy import Mixture, Schedule, Write, prompts_of, writer
from runs import launched
from tiny import tiny

OFF: list[Example] = [([3 + i, 9, 11, *range(20, 26 + i % 5)], 2 + i % 2) for i in range(12)]
PROMPTS = [[4, 5 + i, *range(30, 31 + i % 4)] for i in range(7)]
WARM = Sampling(temperature=1.0)


def numbered(prompts: list[list[int]], seeds: list[int]) -> list[Example]:
    """A writer that needs no model: the row says which seed it was written with."""
    return [([*prompt, seed], len(prompt)) for prompt, seed in zip(prompts, seeds, strict=True)]


def mixture(
    write: Write = numbered, told: list[dict[str, object]] | None = None, plan: Plan | None = None, **changes: float
) -> Mixture:
    plan = plan or Plan(OFF, 3, 10, seed=1)
    schedule = Schedule(**{"share": 0.5, "refresh_every": 8, "rows": 6, "seed": 2, **changes})  # type: ignore[arg-type]
    return Mixture(plan.step, plan.steps, 3, schedule, PROMPTS, write, [2], [].append if told is None else told.append)


def test_a_step_is_on_policy_by_chance_and_the_plan_goes_on_behind_it() -> None:
    plan = Plan(OFF, 3, 10, seed=1)
    mix = mixture()
    taken = [mix.takes(step) for step in range(plan.steps)]
    assert 10 <= sum(taken) <= 30  # of 40
    assert taken == [mixture().takes(step) for step in range(plan.steps)]
    assert taken != [mixture(seed=3).takes(step) for step in range(plan.steps)]
    off = [mix.step(step) for step in range(plan.steps) if not taken[step]]
    assert off == [plan.step(number) for number in range(len(off))], "no row of the plan is passed over"
    assert mix.step(taken.index(False)) == plan.step(0)  # a function of the step, in whatever order it is asked


def test_shares_of_nothing_and_of_all() -> None:
    plan = Plan(OFF, 3, 10, seed=1)
    calls: list[int] = []

    def counting(prompts: list[list[int]], seeds: list[int]) -> list[Example]:
        calls.append(len(prompts))
        return numbered(prompts, seeds)

    none = mixture(counting, share=0.0)
    assert [none.step(step) for step in range(plan.steps)] == [plan.step(step) for step in range(plan.steps)]
    assert not calls, "nothing is written that no step would read"
    everything = mixture(counting, share=1.0)
    steps = [everything.step(step) for step in range(plan.steps)]
    assert calls == [6] * 5
    assert not [row for step in steps for row in step if row in OFF]


def test_the_buffer_is_refreshed_on_schedule_and_read_once_over_before_a_row_comes_again() -> None:
    told: list[dict[str, object]] = []
    mix = mixture(told=told, share=1.0)
    steps = [mix.step(step) for step in range(16)]
    rows = [[row for step in steps[start : start + 2] for row in step] for start in range(0, 16, 2)]
    first, second = rows[0], rows[4]
    assert rows == [first] * 4 + [second] * 4
    assert len({tuple(ids) for ids, _ in first}) == 6
    assert not {ids[-1] for ids, _ in first} & {ids[-1] for ids, _ in second}, "another refresh, other noise"
    assert sorted(ids[:prompt] for ids, prompt in first) != sorted(ids[:prompt] for ids, prompt in second), "and other prompts"
    assert all(ids[:prompt] in PROMPTS for ids, prompt in [*first, *second])
    assert told == [{"step": step, "written_by_the_draft": {"rows": 6, "tokens": 6, "finished": 0}} for step in (1, 9)]
    assert mixture(seed=5, share=1.0).step(0) != steps[0]


def test_more_rows_than_prompts_takes_each_prompt_as_often() -> None:
    mix = mixture(share=1.0, rows=16)
    counts = [[ids[:prompt] for ids, prompt in (mix.step(0) and mix._rows)].count(one) for one in PROMPTS]
    assert sorted(counts) == [2, 2, 2, 2, 2, 3, 3]
    assert len({ids[-1] for ids, _ in mix._rows}) == 16, "the same prompt is answered with other noise"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on_policy.rows=2 asked, and a step takes 3"):
        mixture(rows=2)
    with pytest.raises(ValueError, match=r"a stored teacher cannot score the rows that the draft writes.*live or states"):
        Train(teacher="stored", on_policy={"share": 0.5})  # type: ignore[arg-type]
    assert prompts_of([([5, 6, 7, 8], 2), ([5, 6, 9], 2), ([1, 2, 3, 4], 3)], 2) == ([[5, 6]], 1)
    with pytest.raises(ValueError, match="the shortest prompt has 2 tokens, and 1 are left"):
        prompts_of([([5, 6, 7, 8], 2)], 1)


def learn(
    folder: Path | None, stop_at: int | None = None, save_at: int | None = None, share: float | None = 0.6
) -> tuple[dict[str, bytes], list[tuple[int, list[Example]]]]:
    """A run of 10 steps with dropout -> the draft's weights, and what was written at which step; `share` None has no mixture at all."""
    target = tiny(attention_dropout=0.1)
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=3e-3)
    written: list[tuple[int, list[Example]]] = []
    write = writer(objective.draft, WARM, 6, [2], 61, 4, accelerator)

    def noting(prompts: list[list[int]], seeds: list[int]) -> list[Example]:
        rows = write(prompts, seeds)
        written.append((now[0], rows))
        return rows

    plan, now = Plan(OFF, 4, 4, seed=1), [0]
    mix = Mixture(plan.step, plan.steps, 4, Schedule(share or 0.0, 3, 8, 2), PROMPTS, noting, [2])
    choice = Choice("block_length", 0)
    accelerator.register_for_checkpointing(choice, mix)
    objective.trainable, optimizer = accelerator.prepare(objective.trainable, optimizer)
    torch.manual_seed(0)
    start = checkpoint.resume(folder, accelerator, {}, 9) if folder else 0

    def batches(step: int) -> list:
        now[0] = step
        return micro_batches(plan.step(step) if share is None else mix.step(step), 2, 0, 1)

    def after(record: object) -> bool:
        step = record.step  # type: ignore[attr-defined]
        if folder and step == save_at:
            held_out = evaluate(objective, [], accelerator)
            choice.see(step, held_out)
            checkpoint.save(folder, step, objective, accelerator, held_out, {}, 9, 0)
        return step == stop_at

    train(
        objective,
        optimizer,
        batches,
        start=start,
        steps=10,
        settings=Train(learning_rate=3e-3),
        accelerator=accelerator,
        after=after,
    )
    return {name: one.detach().numpy().tobytes() for name, one in objective.draft.named_parameters()}, written


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict[str, bytes], list[tuple[int, list[Example]]]]:
    weights, written = learn(None)
    steps = [step for step, _ in written]
    assert len(steps) == 4, steps  # a refresh in each period, else kills between refreshes test nothing
    return weights, written


@pytest.mark.parametrize("saved, killed", [(1, 1), (2, 4), (4, 4), (5, 7), (6, 6), (8, 9), (10, 10)])
def test_killed_anywhere_it_ends_with_the_same_bits(undisturbed: tuple, tmp_path: Path, saved: int, killed: int) -> None:
    """Between two refreshes, at a border, at the end: the rows in the buffer are those that the draft wrote then, not anew."""
    _, before = learn(tmp_path, stop_at=killed, save_at=saved)
    weights, behind = learn(tmp_path)
    assert weights == undisturbed[0]
    assert [one for one in before if one[0] < saved] + behind == undisturbed[1]


def test_the_rows_are_the_drafts_as_it_is_when_they_are_written(undisturbed: tuple) -> None:
    _, written = undisturbed
    assert all(ids[:prompt] in PROMPTS for _, rows in written for ids, prompt in rows)
    target = tiny()
    draft = CutDraft(target, [0, 1])
    write = writer(draft, WARM, 6, [2], 61, 4, Accelerator(cpu=True))
    prompts, seeds = PROMPTS[:4], [1, 2, 3, 4]
    rows = write(prompts, seeds)
    assert rows == write(prompts, seeds) == write_rows(draft.whole(), prompts, WARM, 6, seeds, [2])
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    assert write(prompts, seeds) != rows
    assert write(prompts, seeds) == write_rows(speaking(draft), prompts, WARM, 6, seeds, [2])


def test_a_share_of_nothing_is_training_off_policy_bit_for_bit(undisturbed: tuple) -> None:
    nothing, written = learn(None, share=0.0)
    assert not written
    assert nothing == learn(None, share=None)[0]
    assert nothing != undisturbed[0]


def test_two_processes_share_the_writing_and_the_held_out_rows(tmp_path: Path) -> None:
    """Both get the very rows and figures of one process, also where one of them has nothing to do."""
    script = tmp_path / "two.py"
    script.write_text(
        f"""
import sys, json, torch
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tiny import noisy, tiny
from draftsmith.distill import CutDraft, DistillDraft, collate
from draftsmith.specdec import Sampling
from draftsmith.train.data.plan import Plan
from draftsmith.train.launch import launched, leave
from draftsmith.train.loop import evaluate
from draftsmith.train.on_policy import Mixture, Schedule, writer
torch.set_num_threads(1)
off, prompts = {OFF!r}, {PROMPTS!r}
with launched("no") as accelerator:
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    objective.trainable = accelerator.prepare(objective.trainable)
    write = writer(objective.draft, Sampling(temperature=1.0), 6, [2], 61, 4, accelerator)
    mix = Mixture(Plan(off, 3, 1, 0).step, 4, 3, Schedule(1.0, 2, 5, 1), prompts, write)
    rows = [mix.step(step) for step in range(4)], write(prompts[:1], [7])
    figures = [evaluate(objective, some, accelerator) for some in ([collate(off[at : at + 5]) for at in (0, 5, 10)], [collate(off)])]
    here = f"{tmp_path}/{{accelerator.num_processes}}-{{accelerator.process_index}}.json"  # lines of two processes may run into each other
    open(here, "w").write(json.dumps([accelerator.num_processes, rows, figures]))
leave(0)
"""
    )
    said = {}
    for processes in (1, 2):
        launched(processes, script)
        said[processes] = [json.loads((tmp_path / f"{processes}-{rank}.json").read_text()) for rank in range(processes)]
        assert [one[0] for one in said[processes]] == [processes] * processes
    (_, rows, figures), *both = said[1][0], *said[2]
    assert len(both) == 2
    assert rows[0][0] != rows[0][2], "refreshed"
    for _, other_rows, other_figures in both:
        assert other_rows == rows
        for one, other in zip(figures, other_figures, strict=True):
            assert other == pytest.approx(one, rel=1e-6)
            assert other == both[0][2][figures.index(one)], "to the last bit the same on both, for both must stop at one step"
