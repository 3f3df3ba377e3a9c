"""Rows in one sequence do not read each other: editing one leaves the hidden states, the loss and the gradients of another alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig

from draftsmith.distill import Batch, CutDraft, DistillDraft, LiveTeacher, WholeDraft, collate
from draftsmith.distill.packing import check_packing, positions
from tiny import FAMILIES, noisy, tiny

A, B, C = ([5, 9, 11, 4, 2, 17], 2), ([7, 8, 21, 33, 2], 1), ([3, 3, 20, 21, 22, 23, 24, 2], 6)
EDITED = ([55, 19, 1, 48, 2, 3], 6)
# A soft cap on scores is beyond what sdpa does.
CASES = [(family, how) for family in FAMILIES for how in ("sdpa", "eager") if (family, how) != ("gemma2", "sdpa")]


def of_b(packed: Batch) -> Batch:
    """The same sequence with nothing but B scored."""
    assert packed.documents is not None
    return packed._replace(scored=packed.scored & (packed.documents == 1))


def slopes(objective: DistillDraft, batch: Batch) -> tuple[float, list[Tensor]]:
    objective.trainable.zero_grad()
    objective.trainable.eval()  # no dropout, which falls otherwise on sequences of another shape
    loss = objective.loss(batch)
    loss.total.backward()
    return loss.total.item(), [one.grad.clone() for one in objective.trainable.parameters() if one.grad is not None]


def same(ones: list[Tensor], others: list[Tensor], slack: float) -> bool:
    return all(torch.allclose(a, b, atol=slack, rtol=slack) for a, b in zip(ones, others, strict=True))


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_editing_one_row_leaves_another_alone(family: str, attention: str) -> None:
    target = tiny(family)
    target.set_attn_implementation(attention)
    check_packing(target, 16)
    drafts = CutDraft(target, [0, 2]), WholeDraft(noisy(target, 0.3))
    teacher = LiveTeacher(target)
    before, after = (of_b(collate([[one, B, C]])) for one in (A, EDITED))
    assert float((teacher.hidden(before) - teacher.hidden(after)).abs().max()) < 1e-6
    for draft in drafts:
        objective = DistillDraft(draft.eval(), teacher)
        features = [draft(*draft.inputs(one)) for one in (before, after)]
        assert torch.allclose(*features, atol=1e-6), type(draft)
        total, found = slopes(objective, before)
        other, others = slopes(objective, after)
        assert abs(total - other) < 1e-6 * max(1.0, abs(total))
        assert same(found, others, 1e-6)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_packed_rows_are_worth_what_padded_ones_are(family: str, attention: str) -> None:
    target = tiny(family)
    target.set_attn_implementation(attention)
    objective = DistillDraft(CutDraft(target, [0, 2]), target)
    padded, packed = collate([A, B, C]), collate([[A, B], [C]])
    assert packed.ids.numel() < padded.ids.numel()
    total, found = slopes(objective, padded)
    other, others = slopes(objective, packed)
    assert abs(total - other) < 1e-5 * abs(total)
    assert same(found, others, 1e-4)
    logits = objective.draft.head(objective.draft(*objective.draft.inputs(packed)))
    assert torch.allclose(logits, objective.draft.head(objective.draft(*objective.draft.inputs(padded))), atol=1e-4)


def test_positions_begin_anew_with_each_row() -> None:
    documents = collate([[A, B], [C]]).documents
    assert documents is not None
    assert positions(documents).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]]


def test_a_model_left_in_training_is_checked_without_dropout_and_left_in_training() -> None:
    model = tiny(attention_dropout=0.5).train()
    check_packing(model, 16)
    assert model.training
    check_packing(tiny().to(torch.bfloat16), 16)


def recurrent() -> Any:
    return AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=61, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4)
    )


def with_slopes() -> Any:
    return AutoModelForCausalLM.from_config(
        FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    )


@pytest.mark.parametrize(("make", "name"), [(recurrent, "MambaForCausalLM"), (with_slopes, "FalconForCausalLM")])
def test_families_that_cannot_keep_rows_apart_are_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .*do not pack"):
        check_packing(make().eval(), 16)


def test_a_family_that_does_not_take_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    forward = model.transformer.forward

    def counts_by_itself(**asked: Any) -> Any:
        return forward(**{name: value for name, value in asked.items() if name != "position_ids"})

    monkeypatch.setattr(model.transformer, "forward", counts_by_itself)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel lets a text .* depend on where it stands"):
        check_packing(model, 16)


def test_windows_that_rows_outgrow_and_attention_without_a_mask_are_refused() -> None:
    check_packing(tiny("gemma2"), 512)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM attends to windows of 512 tokens.*up to 513"):
        check_packing(tiny("gemma2"), 513)
    model = tiny()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="under flash_attention_2 attention"):
        check_packing(model, 16)
