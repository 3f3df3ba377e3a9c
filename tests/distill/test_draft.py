"""What the draft is taught at which positions, in chunks as whole; how it is cut, started and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.distill import LOSSES, Batch, CutDraft, DistillDraft, DistillExits, Objective, WholeDraft, acceptance, collate, cut
from draftsmith.distill.warm.ridge import ridge
from draftsmith.specdec import EarlyExitDrafter, ModelDrafter, generate
from draftsmith.specdec.drafters.exit_heads import ExitSettings
from draftsmith.specdec.models import blocks
from tiny import FAMILIES, noisy, tiny

ROWS = [([5, 9, 11, 4, 2], 3), ([7, 8, 2], 1), ([3, 3, 20, 21, 22, 23, 24, 2], 6)]


def slopes(objective: DistillDraft, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    objective.trainable.zero_grad()
    loss = objective.loss(batch)
    loss.total.backward()
    return loss.total.item(), {
        name: one.grad.clone() for name, one in objective.trainable.named_parameters() if one.grad is not None
    }


def test_scored_is_where_an_answer_token_is_predicted_eos_included_though_it_is_the_pad() -> None:
    batch = collate(ROWS, pad=2)
    assert batch.scored.tolist() == [
        [False, False, True, True, False, False, False, False],
        [True, True, False, False, False, False, False, False],
        [False, False, False, False, False, True, True, False],
    ]
    assert int(batch.real.sum()) == 16
    predicted = batch.ids.roll(-1, dims=1)[batch.scored].tolist()
    assert predicted == [4, 2, 8, 2, 24, 2]
    with pytest.raises(ValueError, match="row 0"):
        collate([([1, 2], 3)])


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("weights", [{"forward_kl": 1.0}, {"reverse_kl": 0.5, "total_variation": 2.0}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # tied and plain; tied and soft-capped
def test_chunks_equal_the_whole(family: str, weights: dict[str, float], chunk: int) -> None:
    target = tiny(family)
    draft = noisy(target, 0.3)
    batch = collate(ROWS)
    total, found = slopes(DistillDraft(draft, target, weights, chunk=chunk), batch)
    draft.zero_grad()
    logits, wanted = draft(input_ids=batch.ids).logits[batch.scored], target(input_ids=batch.ids).logits[batch.scored].detach()
    naive = sum((weight * LOSSES[name](logits, wanted).sum() for name, weight in weights.items()), torch.zeros(()))
    naive.backward()
    assert abs(total - naive.item()) < 1e-5 * max(1, abs(naive.item()))
    for name, one in DistillDraft(draft, target).trainable.named_parameters():
        if one.grad is not None:
            assert torch.allclose(found[name], one.grad, atol=1e-5, rtol=1e-4), name


def test_metrics_are_sums_over_scored_tokens() -> None:
    target = tiny()
    draft, batch = noisy(target, 0.3), collate(ROWS)
    metrics = DistillDraft(draft, target).loss(batch).metrics
    logits, wanted = draft(input_ids=batch.ids).logits[batch.scored], target(input_ids=batch.ids).logits[batch.scored]
    assert abs(float(metrics["acceptance"]) - acceptance(logits, wanted).sum().item()) < 1e-4
    assert float(metrics["agreement"]) == float((logits.argmax(-1) == wanted.argmax(-1)).sum())
    assert float(metrics["scored"]) == 6


def test_a_student_that_is_the_teacher_has_nothing_to_learn() -> None:
    target = tiny()
    total, found = slopes(DistillDraft(noisy(target, 0.0), target), collate(ROWS))
    assert abs(total) < 1e-5
    assert max(float(one.abs().max()) for one in found.values()) < 1e-5


def test_padding_and_what_it_holds_change_nothing() -> None:
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    total, found = slopes(objective, collate(ROWS, pad=0))
    wide = collate([*ROWS, ([9] * 20, 20)], pad=2)  # a row of which nothing is scored widens the batch
    other_total, others = slopes(objective, wide)
    assert abs(total - other_total) < 1e-4
    assert all(torch.allclose(found[name], others[name], atol=1e-4, rtol=1e-4) for name in found)


def test_changing_what_is_not_scored_behind_a_position_changes_nothing_and_before_it_does() -> None:
    target = tiny()
    objective = DistillDraft(noisy(target, 0.3), target)
    batch = collate([([5, 9, 11, 4, 2, 8, 8], 3)])
    only = Batch(batch.ids, batch.real, torch.tensor([[False, False, True, False, False, False, False]]))
    before = float(objective.loss(only).total)
    for place in range(7):
        ids = batch.ids.clone()
        ids[0, place] = 30
        changed = abs(float(objective.loss(only._replace(ids=ids)).total) - before) > 1e-6
        assert changed == (place <= 2), place  # the prediction made at 2 sees tokens 0..2 only


def test_the_teacher_is_frozen_in_eval_mode_and_gets_no_gradient() -> None:
    target = tiny().train()
    before = {name: one.clone() for name, one in target.state_dict().items()}
    objective = DistillDraft(CutDraft(target, [0, 2]), target)
    optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=1e-2)
    for _ in range(3):
        slopes(objective, collate(ROWS))
        optimizer.step()
    assert not target.training
    assert all(one.grad is None for one in target.parameters())
    assert all(torch.equal(one, before[name]) for name, one in target.state_dict().items())


@pytest.mark.parametrize("kind", ["cut", "whole", "exits"])
def test_a_step_asks_the_teacher_once_and_dropout_is_the_drafts_alone(kind: str) -> None:
    target, batch = tiny("gpt2"), collate(ROWS)  # a family that drops a tenth unless it is told otherwise
    objective: Objective
    if kind == "exits":
        objective = DistillExits(target, [ExitSettings(1, "block", 8)])
    else:
        objective = DistillDraft(CutDraft(target, [0, 2]) if kind == "cut" else WholeDraft(noisy(target), target), target)
    objective.trainable.train()
    modes = [one.training for one in objective.trainable.modules()]
    calls: list[bool] = []
    blocks(target)[1][-1].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    losses = [float(objective.loss(batch).total.detach()) for _ in range(2)]
    assert calls == [False, False]
    assert [one.training for one in objective.trainable.modules()] == modes
    assert not any(one.training for one in target.modules())
    assert losses[0] != losses[1], "dropout was silenced in what learns"
    objective.trainable.eval()
    assert torch.equal(objective.loss(batch).total, objective.loss(batch).total)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_draft_is_the_layers_it_names(family: str) -> None:
    target = tiny(family)
    ids = torch.tensor([[5, 9, 11, 4]])
    with torch.no_grad():
        assert torch.equal(cut(target, [0, 1, 2])(input_ids=ids).logits, target(input_ids=ids).logits)
        exit_ = EarlyExitDrafter(target, 2).model
        assert torch.allclose(cut(target, [0, 1])(input_ids=ids).logits, exit_(input_ids=ids).logits, atol=1e-6)
        assert torch.equal(cut(target, [0, 2], tied=False)(input_ids=ids).logits, cut(target, [0, 2])(input_ids=ids).logits)
    out = generate(
        target, [[5, 9, 11]], ModelDrafter(cut(target, [0, 2])), k=3, max_new_tokens=12
    )  # its layers are numbered anew for its cache
    assert out.tokens == generate(target, [[5, 9, 11]], max_new_tokens=12).tokens
    for wrong in ([], [3], [1, 1]):
        with pytest.raises(ValueError, match=r"layers 0\.\.2"):
            cut(target, wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_draft_says_what_the_trained_one_said(family: str, tmp_path: Path) -> None:
    target = tiny(family)
    draft = CutDraft(target, [0, 2])
    objective = DistillDraft(draft, target)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    batch = collate(ROWS)
    objective.save(tmp_path / "untrained")
    with torch.no_grad():
        untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "untrained")(input_ids=batch.ids).logits
        assert torch.allclose(untouched, cut(target, [0, 2])(input_ids=batch.ids).logits, atol=1e-6)
    first = float(objective.loss(batch).total)
    for _ in range(8):
        slopes(objective, batch)
        optimizer.step()
    assert float(objective.loss(batch).total) < 0.8 * first
    objective.save(tmp_path / "trained")
    draft.eval()
    with torch.no_grad():
        wanted = draft.head(draft(*draft.inputs(batch)))
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")(input_ids=batch.ids).logits[batch.scored]
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    assert (tmp_path / "trained" / "drafter.json").is_file()


def test_the_ridge_map_is_the_least_squares_answer_and_raises_acceptance() -> None:
    target = tiny()
    draft = CutDraft(target, [0, 1])
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(3, 61, (24,), generator=generator).tolist(), 4) for _ in range(40)]
    train, held_out = [collate(rows[:16]), collate(rows[16:32])], [collate(rows[32:])]
    objective = DistillDraft(draft, target)
    fit = ridge(draft, objective.teacher, train, held_out)
    assert fit.tokens == 2 * 16 * 20
    assert fit.acceptance > fit.before
    x = torch.cat([draft.features(*draft.inputs(batch)) for batch in train]).double()
    y = torch.cat([objective.teacher.hidden(batch) for batch in train]).double()
    strength = fit.strength * float((x.T @ x).diagonal().mean())
    pulled = draft.map.weight.detach().double() - (torch.eye(32) if fit.pull == "start" else 0)
    residual = x.T @ (x @ draft.map.weight.double().T - y) + strength * pulled.T  # the normal equations
    assert float(residual.abs().max()) < 1e-3 * float((x.T @ y).abs().max())
    with pytest.raises(ValueError, match="no scored token"):
        ridge(draft, objective.teacher, [], held_out)


def test_losses_and_vocabularies_that_do_not_exist_are_refused() -> None:
    target = tiny()
    with pytest.raises(ValueError, match="did you mean 'forward_kl'"):
        DistillDraft(noisy(target), target, "forward_lk")
    with pytest.raises(ValueError, match="40 output rows, the target 61"):
        DistillDraft(tiny(vocab_size=40), target)
