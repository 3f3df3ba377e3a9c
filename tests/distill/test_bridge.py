"""A refitted block says what the skipped layers would have said; nothing else changes, and where it cannot work it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.distill import CutDraft, LiveTeacher
from draftsmith.distill.draft import save_draft
from draftsmith.distill.warm.bridge import bridge, cannot_bridge
from draftsmith.distill.warm.ridge import ridge
from tiny import FAMILIES, batches, tiny

HELD_OUT = batches(16, seed=1)


def test_a_skipped_layer_that_scales_the_stream_by_what_an_mlp_can_say_is_bridged_to_nothing() -> None:
    """Layer 1 adds to the stream just what layer 0's MLP added, so doubling that MLP's last projection is exact."""
    target = tiny()
    first, second = target.model.layers[0], target.model.layers[1]
    with torch.no_grad():
        second.self_attn.o_proj.weight.zero_()
        second.mlp.down_proj.weight.zero_()
    change = torch.randn(32, 48, generator=torch.Generator().manual_seed(3)) * 0.2
    kept: list[torch.Tensor] = []
    first.mlp.down_proj.register_forward_hook(lambda _module, inputs, _output: kept.append(inputs[0]))
    second.register_forward_hook(lambda _module, _inputs, output: output + kept[-1] @ change.T)
    draft = CutDraft(target, [0, 2])
    before = draft.body.layers[0].mlp.down_proj.weight.clone()
    (report,) = bridge(draft, batches(), HELD_OUT)
    assert (report.block, report.to) == (0, 2)
    assert report.after < 1e-4 < report.before
    assert torch.allclose(draft.body.layers[0].mlp.down_proj.weight - before, change, atol=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_bridged_or_says_why_not(family: str, tmp_path: Path) -> None:
    target = tiny(family)
    draft = CutDraft(target, [0, 2])
    theirs = {name: one.clone() for name, one in target.state_dict().items()}
    ours = {name: one.clone() for name, one in draft.state_dict().items()}
    if family in ("gemma2", "olmo2", "qwen3_moe"):
        assert cannot_bridge(draft) is not None
        with pytest.raises(ValueError, match="cannot be bridged"):
            bridge(draft, batches(), HELD_OUT)
        return
    (report,) = bridge(draft, batches(), HELD_OUT)
    assert report.strength is not None
    assert report.after < report.before
    changed = [name for name, one in draft.state_dict().items() if not torch.equal(one, ours[name])]
    assert len(changed) == 1
    assert "0.mlp." in changed[0]
    assert all(torch.equal(one, theirs[name]) for name, one in target.state_dict().items())
    assert not any(one._forward_hooks for one in [*target.modules(), *draft.modules()])
    save_draft(draft.whole(), tmp_path)
    batch = HELD_OUT[0]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=batch.ids).logits[batch.scored]
        assert torch.allclose(found, draft.eval().head(draft(*draft.inputs(batch))), atol=1e-3, rtol=1e-3)


def test_first_layers_need_no_bridge_and_one_block_has_none() -> None:
    target = tiny()
    for layers in ([0, 1], [0], [2]):
        assert bridge(CutDraft(target, layers), batches(), HELD_OUT) == []
    assert [(one.block, one.to) for one in bridge(CutDraft(target, [1, 2]), batches(), HELD_OUT)] == [(0, 2)]


def test_a_bridge_hangs_on_real_tokens_alone_however_they_are_batched() -> None:
    target = tiny()
    weights = []
    for size in (8, 1, 48):
        draft = CutDraft(target, [0, 2])
        bridge(draft, batches(size=size), HELD_OUT)
        weights.append(draft.body.layers[0].mlp.down_proj.weight.detach())
    assert torch.allclose(weights[0], weights[1], atol=1e-4)
    assert torch.allclose(weights[0], weights[2], atol=1e-4)


def test_a_bridge_that_does_not_help_is_not_built() -> None:
    target = tiny()
    with torch.no_grad():
        for name in ("o_proj", "down_proj"):
            for part in (target.model.layers[1].self_attn, target.model.layers[1].mlp):
                if hasattr(part, name):
                    getattr(part, name).weight.zero_()  # layer 1 says nothing, so skipping it costs nothing
    draft = CutDraft(target, [0, 2])
    before = draft.body.layers[0].mlp.down_proj.weight.clone()
    (report,) = bridge(draft, batches(), HELD_OUT)
    assert report.strength is None
    assert torch.equal(draft.body.layers[0].mlp.down_proj.weight, before)
    assert ridge(draft, LiveTeacher(target), batches(), HELD_OUT).before > 0.9999
    with pytest.raises(ValueError, match="no batch"):
        bridge(draft, [], HELD_OUT)
