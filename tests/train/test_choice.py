"""The best checkpoint has the longest held-out blocks, whatever its loss; patience is part of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.distill import DistillDraft, collate
from draftsmith.distill.block_length import block_length
from draftsmith.recipes import runs
from draftsmith.recipes.checksums import write_sums
from draftsmith.recipes.schema import Train
from draftsmith.train import checkpoint
from draftsmith.train.choice import Choice
from draftsmith.train.loop import evaluate, train
from small import Small
from tiny import noisy, tiny

# (block_length, acceptance, loss) of the evaluations of a run: loss and acceptance would choose others.
SEEN = [(1.2, 0.1, 3.0), (1.5, 0.3, 2.0), (1.9, 0.2, 2.5), (1.9, 0.25, 0.5), (1.8, 0.4, 0.4), (1.7, 0.1, 0.3), (2.5, 0.1, 9.0)]
PLAN = {"processes": 1}


def figures(step: int) -> dict[str, float]:
    block, accepted, loss = SEEN[step - 1]
    return {"block_length": block, "greedy_block_length": -block, "acceptance": accepted, "loss": loss}


def carry_on(folder: Path, choice: Choice, stop_at: int, keep: int = 2) -> int:
    """Evaluate and save at each step, as a run does, from its last checkpoint up to `stop_at` or the end of patience."""
    accelerator, objective = Accelerator(cpu=True), Small()
    objective.trainable = accelerator.prepare(objective.trainable)
    accelerator.register_for_checkpointing(choice)
    step = checkpoint.resume(folder, accelerator, PLAN, keep, choice.by)
    while step < stop_at and not choice.over:
        step += 1
        choice.see(step, figures(step))
        checkpoint.save(folder, step, objective, accelerator, figures(step), PLAN, keep, 0, choice.by)
    return step


def test_the_best_has_the_longest_blocks_and_the_first_of_equals_stays(tmp_path: Path) -> None:
    carry_on(tmp_path, Choice("block_length", 0), 6)
    told = json.loads((tmp_path / "best.json").read_text())
    assert told["checkpoint"] == "step-3"  # neither the lowest loss (6), nor the highest acceptance (5), nor the equal one (4)
    assert told["by"] == "block_length"
    assert told["held_out"]["block_length"] == 1.9
    assert runs.best(tmp_path) == tmp_path / "step-3"
    assert [one.name for one in runs.steps(tmp_path)] == ["step-3", "step-5", "step-6"]
    assert runs.find_draft(tmp_path, "latest") == tmp_path / "step-6" / "draft"
    carry_on(tmp_path / "greedy", Choice("greedy_block_length", 0), 6)
    assert json.loads((tmp_path / "greedy" / "best.json").read_text())["checkpoint"] == "step-1"


@pytest.mark.parametrize("patience, ends", [(1, 4), (2, 5), (3, 6), (4, 7), (0, 7)])
@pytest.mark.parametrize("killed", [None, 1, 3, 4, 5])
def test_patience_ends_a_run_at_the_same_step_whether_or_not_it_was_killed(
    tmp_path: Path, patience: int, ends: int, killed: int | None
) -> None:
    if killed:
        carry_on(tmp_path, Choice("block_length", patience), killed)
    choice = Choice("block_length", patience)
    assert carry_on(tmp_path, choice, 7) == ends
    assert choice.over == (patience > 0 and ends < 7)
    assert carry_on(tmp_path, again := Choice("block_length", patience), 7) == ends, "a run that has stopped stays stopped"
    assert again.state_dict() == choice.state_dict()
    if choice.over:
        assert choice.why() == f"no better held-out block_length in {patience} evaluations; the best was 1.900, at step 3"


def test_a_checkpoint_that_was_chosen_by_another_figure_is_refused(tmp_path: Path) -> None:
    carry_on(tmp_path, Choice("block_length", 0), 2)
    with pytest.raises(ValueError, match="chosen by block_length, this run chooses by greedy_block_length"):
        carry_on(tmp_path, Choice("greedy_block_length", 0), 3)
    state = tmp_path / "step-2" / "state.json"
    about = json.loads(state.read_text())
    del about["held_out"]["block_length"]
    state.write_text(json.dumps(about))
    write_sums(tmp_path / "step-2")
    with pytest.raises(ValueError, match=r"step-2 has no held-out block_length, only greedy_block_length, acceptance, loss"):
        carry_on(tmp_path, Choice("block_length", 0), 3)
    assert runs.best(tmp_path) == tmp_path / "step-2", "what was chosen can still be read"


def test_training_ends_where_its_caller_says_so() -> None:
    target = tiny()
    objective = DistillDraft(noisy(target), target)
    optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=1e-4)
    steps: list[int] = []

    def after(record: object) -> bool:
        steps.append(record.step)  # type: ignore[attr-defined]
        return len(steps) == 3

    train(
        objective, optimizer, lambda step: [collate([([5, 9, 11, 4], 2)])], start=2, steps=9, settings=Train(),
        accelerator=Accelerator(cpu=True), after=after,
    )  # fmt: skip
    assert steps == [3, 4, 5]


ROWS = [([5, 9, 11, 4], 3), ([7, *range(20, 29)], 1), ([3, 3, 20, 21], 2), ([8, *range(30, 37)], 2), ([6, *range(40, 55)], 2)]


def alphas_by_hand(objective: DistillDraft, target: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """A row at a time, without padding, sharing no code with the loss: acceptance and agreement at its scored positions."""
    accepted, agreed = [], []
    with torch.no_grad():
        for ids, prompt in ROWS:
            one = torch.tensor([ids])
            p, q = target(input_ids=one).logits[0, prompt - 1 : -1], objective.draft.model(input_ids=one).logits[0, prompt - 1 : -1]
            accepted.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
            agreed.append((p.argmax(-1) == q.argmax(-1)).double())
    return accepted, agreed


@pytest.mark.parametrize("pieces", [[[0, 1, 2, 3, 4]], [[4, 0], [1], [3, 2]]])
def test_held_out_figures_are_of_rows_not_of_batches(pieces: list[list[int]]) -> None:
    target = tiny()
    objective = DistillDraft(noisy(target, 0.1), target, chunk=5)
    batches = [collate([ROWS[i] for i in piece], pad=piece[0]) for piece in pieces]
    held_out = evaluate(objective, batches, Accelerator(cpu=True), k=3)
    accepted, agreed = alphas_by_hand(objective, target)
    assert held_out["scored"] == 32
    assert held_out["block_length"] == pytest.approx(block_length(accepted, 3), rel=1e-5)
    assert held_out["block_length_at_most"] == held_out["block_length"]
    assert held_out["greedy_block_length"] == pytest.approx(block_length(agreed, 3), rel=1e-9)
    assert held_out["acceptance"] == pytest.approx(float(torch.cat(accepted).mean()), rel=1e-5)
    assert held_out["agreement"] == pytest.approx(float(torch.cat(agreed).mean()), rel=1e-9)
    assert 0 < held_out["agreement"] < 1
    assert held_out["block_length"] != pytest.approx(evaluate(objective, batches, Accelerator(cpu=True), k=1)["block_length"])
    assert objective.trainable.training


def test_an_objective_without_positions_and_a_draft_without_a_law_are_refused() -> None:
    target = tiny()
    objective = DistillDraft(noisy(target), target)
    inner = objective.loss
    objective.loss = lambda batch: inner(batch)._replace(each=None)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"DistillDraft.loss gave no `each` in eval mode"):
        evaluate(objective, [collate(ROWS)], Accelerator(cpu=True))
    broken = DistillDraft(noisy(target), target)
    with torch.no_grad():
        next(broken.trainable.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="held-out block length is nan"):
        evaluate(broken, [collate(ROWS)], Accelerator(cpu=True))
