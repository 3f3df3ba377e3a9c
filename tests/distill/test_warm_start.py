"""The closed-form start: what it finds, that it is never worse than what was there, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from draftsmith.distill import CutDraft, LiveTeacher, WholeDraft, cut
from draftsmith.distill.draft import save_draft
from draftsmith.distill.head import Head, last_hidden
from draftsmith.distill.warm.ridge import exit_head, exits, ridge
from draftsmith.specdec.drafters.early_exit import exit_view
from tiny import FAMILIES, batches, noisy, tiny

HELD_OUT = batches(16, seed=1)


def widened(model: Any) -> Any:
    """The same function with twice the width, the other half of it 0, and a final norm that scales each feature anew."""
    config = copy.deepcopy(model.config)
    config.hidden_size, config.head_dim, config.tie_word_embeddings = 64, 8, False
    wide = LlamaForCausalLM(config).eval()
    theirs = model.state_dict()
    with torch.no_grad():
        for name, weight in wide.state_dict().items():
            weight.zero_()
            old = theirs[name]
            weight[tuple(slice(n) for n in old.shape)] = old / 2**0.5 if "norm" in name else old
        torch.manual_seed(5)
        wide.model.norm.weight.mul_(torch.rand(64) + 0.5)
        wide.lm_head.weight.normal_()
    return wide


def test_a_draft_whose_states_are_a_linear_image_of_the_targets_is_the_target_after_it(tmp_path: Path) -> None:
    target = tiny()
    draft = WholeDraft(widened(target))  # half its features are 0: X'X is singular
    before = {name: one.clone() for name, one in target.state_dict().items()}
    fit = ridge(draft, LiveTeacher(target), batches(), HELD_OUT)
    assert fit.before < 0.7
    assert fit.acceptance > 0.9999
    assert fit.agreement == 1
    assert all(torch.equal(one, before[name]) for name, one in target.state_dict().items())
    save_draft(draft.whole(), tmp_path)
    ids = HELD_OUT[0].ids
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids).logits
        assert torch.allclose(found, target(input_ids=ids).logits, atol=1e-2)


def test_a_fit_hangs_on_the_tokens_alone_not_on_how_they_come() -> None:
    target = tiny()
    maps = []
    for size in (8, 1, 48, 8):
        draft = CutDraft(target, [0, 1])
        ridge(draft, LiveTeacher(target), batches(size=size), HELD_OUT)
        maps.append(draft.map.weight.detach())
    assert torch.equal(maps[0], maps[3])
    assert torch.allclose(maps[0], maps[1], atol=2e-3)
    assert torch.allclose(maps[0], maps[2], atol=2e-3)


def test_what_is_better_already_is_kept() -> None:
    target = tiny()
    draft = WholeDraft(cut(target, [0, 1, 2], tied=False))
    before = {name: one.clone() for name, one in draft.model.state_dict().items()}
    fit = ridge(draft, LiveTeacher(target), batches(), HELD_OUT)
    assert (fit.strength, fit.pull) == (None, None)
    assert fit.acceptance == fit.before > 0.9999
    assert all(torch.equal(one, before[name]) for name, one in draft.model.state_dict().items())


def test_a_map_that_is_nearly_right_is_pulled_to_what_it_was_not_to_nothing() -> None:
    target = tiny()
    draft = CutDraft(target, [0, 1, 2])
    with torch.no_grad():
        noise = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * 0.2
        draft.body.norm.weight.mul_(torch.linspace(0.9, 1.1, 32))  # the map it needs is not far from the identity
        draft.body.layers[2].mlp.down_proj.weight[:, :32] += noise
    few = batches(6)  # 49 tokens for 32 features
    fit = ridge(draft, LiveTeacher(target), few, batches(60, seed=1))
    assert fit.pull == "start"
    assert fit.acceptance > fit.before
    assert float((draft.map.weight.detach() - torch.eye(32)).abs().max()) < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_exits_come_from_one_forward_and_say_what_their_maps_say(family: str) -> None:
    target = tiny(family)
    before = {name: one.clone() for name, one in target.state_dict().items()}
    calls: list[int] = []
    body = getattr(target, target.base_model_prefix)
    handle = body.register_forward_hook(lambda *_: calls.append(1))
    found = exits(target, [1, 2, 3], batches(), HELD_OUT)
    handle.remove()
    assert len(calls) == len(batches()) + len(HELD_OUT)
    assert list(found) == [1, 2, 3]
    assert all(one.fit.acceptance >= one.fit.before for one in found.values())
    assert found[3].fit.acceptance > 0.999  # the last layer is the target
    ids = HELD_OUT[0].ids
    with torch.no_grad():
        view = exit_view(target, 2, head=exit_head(target, found[2].map))
        wanted = Head(target)(last_hidden(exit_view(target, 2), ids) @ found[2].map.T)
        assert torch.allclose(view(input_ids=ids).logits, wanted, atol=1e-3, rtol=1e-3)
    assert all(torch.equal(one, before[name]) for name, one in target.state_dict().items())
    assert not any(layer._forward_hooks for layer in target.modules())
    with pytest.raises(ValueError, match=r"layers \[4\] asked"):
        exits(target, [4], batches(), HELD_OUT)


def test_what_cannot_be_fitted_is_refused_by_name() -> None:
    target = tiny()
    teacher, draft = LiveTeacher(target), CutDraft(target, [0, 1])
    with pytest.raises(ValueError, match="no scored token"):
        ridge(draft, teacher, [], HELD_OUT)
    with pytest.raises(ValueError, match="30 tokens cannot fit a map of 32 features"):
        ridge(draft, teacher, batches(3), HELD_OUT)
    with pytest.raises(ValueError, match="0 held-out tokens"):
        ridge(draft, teacher, batches(), [])
    with torch.no_grad():
        draft.body.norm.weight.zero_()
    with pytest.raises(ValueError, match="all zero"):
        ridge(draft, teacher, batches(), HELD_OUT)
    with torch.no_grad():
        draft.body.norm.weight[3] = torch.nan
    with pytest.raises(ValueError, match="not all finite"):
        ridge(draft, teacher, batches(), HELD_OUT)
    assert torch.equal(draft.map.weight, torch.eye(32))
    tied = tiny(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="tied=False"):
        ridge(WholeDraft(tied), LiveTeacher(tied), batches(), HELD_OUT)
    with pytest.raises(ValueError, match="40 output rows"):
        ridge(WholeDraft(noisy(tiny(vocab_size=40))), teacher, batches(), HELD_OUT)
    capped = tiny("gemma2")
    with pytest.raises(ValueError, match="soft cap of 30"):
        ridge(WholeDraft(tiny()), LiveTeacher(capped), batches(), HELD_OUT)
