"""A loss or a gradient that is not finite moves no weight: the run ends with its rows named, or passes over as many as it may."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from draftsmith.distill import Batch, CutDraft, DistillDraft, Loss, collate
from draftsmith.recipes import runs
from draftsmith.recipes.schema import Train
from draftsmith.train import engines
from draftsmith.train.bad_steps import Skips
from draftsmith.train.loop import Record, train
from draftsmith.train.stored.shards import places
from runs import inside, told, write_run
from tiny import tiny

GOOD = [[([5, 9, 11, 4], 3), ([7, *range(20, 29)], 1)], [([3, 3, 20, 21], 2)], [([8, *range(30, 37)], 2)]]
BAD = [([6, *range(40, 55)], 2), ([6, 7, 8], 1)]
UNSCORED = [([6, 7, 8], 3)]


def trained(
    steps: list[list[tuple[list[int], int]]], skips: Skips | None, infinite: bool = False
) -> tuple[list[torch.Tensor], list[Record]]:
    """The weights after steps of these rows, the loss of BAD's being nan in its gradient only, or `infinite`."""
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    whole = objective.loss

    def loss(batch: Batch) -> Loss:
        made = whole(batch)
        bad = batch.ids.shape == collate(BAD).ids.shape
        worse = made.total * math.inf if infinite else made.total + (made.total - made.total).sqrt()  # 0, with a slope of 0 / 0
        return made._replace(total=worse) if bad else made

    objective.loss = loss  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=1.0)
    records: list[Record] = []
    train(
        objective, optimizer, lambda step: [collate(steps[step])], start=0, steps=len(steps), settings=Train(learning_rate=1e-2),
        accelerator=Accelerator(cpu=True), after=records.append, skips=skips,
    )  # fmt: skip
    return [one.detach().clone() for one in objective.trainable.parameters()], records


@pytest.mark.parametrize("infinite", [False, True])
def test_a_step_passed_over_is_as_one_without_a_scored_token(infinite: bool) -> None:
    skips = Skips(1)
    weights, records = trained([GOOD[0], BAD, GOOD[1], GOOD[2]], skips, infinite)
    wanted, _ = trained([GOOD[0], UNSCORED, GOOD[1], GOOD[2]], None)
    assert skips.steps == [2]
    assert all(map(torch.equal, weights, wanted))
    assert records[1].loss == math.inf if infinite else math.isfinite(records[1].loss)
    assert not math.isfinite(records[1].grad_norm)
    assert [record.bad is None for record in records] == [True, False, True, True]


def test_the_run_ends_where_there_are_more_than_it_may_pass_over_with_its_rows_named() -> None:
    for most, ends in ((0, 2), (1, 3)):
        with pytest.raises(FloatingPointError) as found:
            trained([GOOD[0], BAD, BAD], Skips(most))
        said = str(found.value)
        assert said.startswith(f"step {ends}: loss ")
        assert (
            f"gradient norm nan, of the rows {places(collate(BAD))[0].key.hex()} (14 scored of 16 tokens: 6 40 41 42 43 44 45 46 ...)"
            in said
        )
        assert f"{places(collate(BAD))[1].key.hex()} (2 scored of 3 tokens: 6 7 8 ...)" in said
        assert f"Weights are those of step {ends - 1}" in said


def test_what_was_passed_over_is_part_of_a_checkpoint() -> None:
    skips = Skips(2)
    skips.take(3)
    again = Skips(2)
    again.load_state_dict(json.loads(json.dumps(skips.state_dict())))
    assert [again.take(step) for step in (5, 6)] == [True, False]
    assert again.steps == [3, 5]


class Engine(torch.nn.Module):
    """What the loop asks of DeepSpeed's engine."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.steps = module, 0

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def set_gradient_accumulation_boundary(self, last: bool) -> None: ...

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        assert not scale_wrt_gas
        loss.backward()

    def step(self) -> None:
        self.steps += 1

    def get_global_grad_norm(self) -> float:
        return float(torch.nn.utils.get_total_norm([one.grad for one in self.parameters() if one.grad is not None]))


@pytest.mark.parametrize("slope", [True, False])
def test_deepspeed_steps_before_anybody_sees_the_norm_and_never_with_a_bad_loss(
    slope: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    objective.trainable = engine = Engine(objective.trainable)
    whole, accelerator = objective.loss, Accelerator(cpu=True)

    def loss(batch: Batch) -> Loss:
        made = whole(batch)
        nothing = made.total - made.total
        return made._replace(total=made.total + (nothing.sqrt() if slope else nothing / nothing))

    objective.loss = loss  # type: ignore[method-assign]
    monkeypatch.setattr(engines, "engine", lambda accelerator: "zero2")
    said = (
        "gradient norm nan, .* DeepSpeed has stepped with it, and nothing was written" if slope else "Weights are those of step 0"
    )
    with pytest.raises(FloatingPointError, match=said):
        train(
            objective, torch.optim.AdamW(engine.parameters(), lr=1.0), lambda step: [collate(BAD)], start=0, steps=1, settings=Train(),
            accelerator=accelerator,
        )  # fmt: skip
    assert engine.steps == int(slope)


def test_a_whole_run_names_its_last_checkpoint_and_with_leave_goes_on_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = write_run(tmp_path), tmp_path / "runs" / "small"
    words = ["train.epochs=1", "train.save_every=2", "train.evaluate_every=2", "train.batch_size=4"]
    whole, seen = DistillDraft.loss, list[list[list[int]]]()

    def loss(self: DistillDraft, batch: Batch) -> Loss:
        made = whole(self, batch)
        if self.trainable.training:
            seen.append(batch.ids.tolist())
        return made._replace(total=made.total * float("nan")) if batch.ids.tolist() in seen[2:3] else made

    monkeypatch.setattr(DistillDraft, "loss", loss)
    for _ in range(2):
        done = inside("train", recipe, *words)
        assert done.returncode == 2
        assert "step 3: loss nan" in done.stderr
        assert f"The last good checkpoint is {run / 'step-2'}" in done.stderr
        assert [one.name for one in runs.steps(run)] == ["step-2"]
        assert [line["step"] for line in told(run) if "loss" in line] == [1, 2], "nothing was written"
        del seen[3:]
    done = inside("train", recipe, *words, "train.skip_bad_steps=1")
    assert done.returncode == 0, done.stderr
    assert "1 of the steps moved nothing, for loss or gradient was not finite: 3" in done.stdout
    (line,) = [line for line in told(run) if line["step"] == 3]
    assert line["skipped"]["loss"] == "nan"  # type: ignore[index]
    assert len(line["skipped"]["rows"]) == 4  # type: ignore[index]
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert runs.number(runs.steps(run)[-1]) > 3
    few = ["eval.candidates=[{drafter: ngram, k: 2}]", "eval.max_new_tokens=2", "eval.per_kind=1", "eval.bootstrap=10"]
    done = inside("eval", recipe, *words, *few)
    assert done.returncode == 0, done.stderr
    assert "In the training of this run 1 of the steps moved nothing" in (run / "report.md").read_text()
