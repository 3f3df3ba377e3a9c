"""A narrower model: exact where nothing, or nothing that is used, goes; and what goes is what writes least."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.distill import CutDraft, DistillDraft, acceptance, collate, cut
from draftsmith.distill.making.width import activity, narrow
from draftsmith.specdec.models import blocks
from tiny import FAMILIES, tiny

BATCHES = [collate([([5, 9, 11, 4, 2], 3), ([7, 8, 2, 31, 40, 12, 6], 1)]), collate([([3, 3, 20, 21, 22, 23, 24, 2], 6)])]
PLAIN = sorted(set(FAMILIES) - {"gpt2", "qwen3_moe"})
TURNED = ["llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"]  # RMSNorm before each part and nowhere else


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=BATCHES[0].ids[1:], use_cache=False).logits


def mlp_of(layer: Any) -> tuple[Any, Any]:
    """What makes the channels and what reads them."""
    return getattr(layer.mlp, "up_proj", None) or layer.mlp.gate_up_proj, layer.mlp.down_proj


def reloaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return again


@pytest.mark.parametrize("family", PLAIN)
def test_at_full_width_nothing_changes(family: str) -> None:
    target = tiny(family)
    assert torch.equal(logits(narrow(target, BATCHES)), logits(target))
    assert torch.equal(logits(narrow(target, BATCHES, intermediate=48, heads=4)), logits(target))


@pytest.mark.parametrize("family", PLAIN)
def test_channels_that_write_nothing_are_those_that_go(family: str, tmp_path: Path) -> None:
    target = tiny(family)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in blocks(target)[1]:
            dead = torch.randperm(48)[:16]  # others in each layer
            mlp_of(layer)[1].weight[:, dead] = 0
    wanted = logits(target)
    draft = narrow(target, BATCHES, intermediate=32)
    assert draft.config.intermediate_size == 32
    assert torch.allclose(logits(draft), wanted, atol=1e-5)
    assert torch.equal(logits(reloaded(draft, tmp_path)), logits(draft))
    assert not torch.allclose(logits(narrow(target, BATCHES, intermediate=24)), wanted, atol=1e-3)


@pytest.mark.parametrize("family", [*sorted(set(PLAIN) - {"olmo2"}), "qwen3_moe"])
def test_a_group_of_heads_that_writes_nothing_is_the_one_that_goes(family: str, tmp_path: Path) -> None:
    target = tiny(family)
    with torch.no_grad():
        for number, layer in enumerate(blocks(target)[1]):
            layer.self_attn.o_proj.weight[:, slice(0, 16) if number % 2 else slice(16, 32)] = 0  # two heads of eight
    wanted = logits(target)
    draft = narrow(target, BATCHES, heads=2)
    text = draft.config
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (2, 1, 8)
    assert torch.allclose(logits(draft), wanted, atol=1e-5)
    assert torch.equal(logits(reloaded(draft, tmp_path)), logits(draft))


def test_the_ranking_is_the_mean_norm_of_what_is_written() -> None:
    target = tiny()
    batch = collate([([5, 9, 11, 4, 2], 3), ([7, 8], 1)])  # the second row is padded, and what stands there must not count
    layer = blocks(target)[1][1]
    seen: dict[str, torch.Tensor] = {}
    layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.update(mlp=args[0]))
    layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.update(attention=args[0]))
    with torch.no_grad():
        target(input_ids=batch.ids)
    into, attended = (seen[name][batch.real].double() for name in ("mlp", "attention"))
    down, out = layer.mlp.down_proj.weight.double(), layer.self_attn.o_proj.weight.double()
    channels = torch.stack([torch.outer(into[:, c], down[:, c]).norm(dim=1).sum() for c in range(48)])
    groups = torch.stack([(attended[:, g * 16 :][:, :16] @ out[:, g * 16 :][:, :16].T).norm(dim=1).sum() for g in range(2)])
    found = activity(target, [batch])[1]
    assert torch.allclose(found[0], channels, rtol=1e-4)
    assert torch.allclose(found[1], groups, rtol=1e-4)
    kept = channels.topk(20).indices.sort().values
    draft = narrow(target, [batch], intermediate=20)
    assert torch.equal(blocks(draft)[1][1].mlp.up_proj.weight, layer.mlp.up_proj.weight[kept])


def test_keeping_the_least_active_instead_is_worse() -> None:
    target = tiny()
    wanted = logits(target)[0]
    good = narrow(target, BATCHES, intermediate=36)
    bad = tiny()
    with torch.no_grad():
        for layer, (channels, _) in zip(blocks(bad)[1], activity(target, BATCHES), strict=True):
            layer.mlp.down_proj.weight[:, channels.topk(12).indices] = 0
    kept = [float(acceptance(logits(model)[0], wanted).mean()) for model in (good, bad)]
    assert 1 - kept[0] < 0.5 * (1 - kept[1])


@pytest.mark.parametrize("family", TURNED)
def test_a_rotation_at_full_size_changes_nothing(family: str, tmp_path: Path) -> None:
    target = tiny(family)
    with torch.no_grad():  # norms that scale, so that folding them matters
        for name, weight in target.named_parameters():
            if "norm" in name:
                weight.copy_(torch.linspace(0.5, 1.5, len(weight)))
    draft = narrow(target, BATCHES, hidden=32)
    assert torch.allclose(logits(draft), logits(target), atol=1e-3)
    assert not torch.allclose(draft.get_input_embeddings().weight, target.get_input_embeddings().weight, atol=1e-2)
    assert torch.equal(logits(reloaded(draft, tmp_path)), logits(draft))


def test_a_stream_that_lives_in_fewer_dimensions_loses_nothing_and_is_a_draft() -> None:
    target = tiny("llama", hidden_size=32)
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(32, 16)).Q
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight @ basis @ basis.T)
        for layer in blocks(target)[1]:
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight.copy_(basis @ basis.T @ writer.weight)
    draft = narrow(target, BATCHES, hidden=16, intermediate=40)
    assert draft.config.hidden_size == 16
    whole = narrow(target, BATCHES, hidden=16)
    assert torch.allclose(logits(whole), logits(target), atol=1e-3)
    assert not torch.allclose(logits(narrow(target, BATCHES, hidden=12)), logits(target), atol=1e-1)
    with pytest.raises(ValueError, match="hidden size 16 cannot share"):
        CutDraft(target, [0, 1, 2], draft)
    DistillDraft(draft, target).loss(BATCHES[0]).total.backward()


def test_a_narrowed_cut_is_trained_between_the_targets_embedding_and_head() -> None:
    target = tiny()
    draft = CutDraft(target, [0, 2], narrow(cut(target, [0, 2]), BATCHES, intermediate=24, heads=2))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    objective = DistillDraft(draft, target)
    first = float(objective.loss(BATCHES[0]).total)
    for _ in range(10):
        optimizer.zero_grad()
        objective.loss(BATCHES[0]).total.backward()
        optimizer.step()
    assert float(objective.loss(BATCHES[0]).total) < 0.8 * first
    whole = draft.eval().whole()
    assert (whole.config.intermediate_size, whole.config.num_attention_heads, whole.config.num_hidden_layers) == (24, 2, 2)
    with torch.no_grad():
        wanted = draft.head(draft(*draft.inputs(BATCHES[0])))
        found = whole(input_ids=BATCHES[0].ids).logits[BATCHES[0].scored]
    assert torch.allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize(
    "family, sizes, says",
    [
        ("llama", {"intermediate": 49}, "49 MLP channels asked; LlamaForCausalLM has 48"),
        ("llama", {"heads": 3}, "in groups of 2"),
        ("llama", {"heads": 6}, "has 4"),
        ("llama", {"hidden": 33}, "hidden size 33 asked"),
        ("llama", {"hidden": 30}, "can't have a hidden size of 30"),
        ("qwen3_moe", {"intermediate": 24}, "no single mlp.down_proj in layer 0"),
        ("gpt2", {"heads": 2}, "no self_attn.o_proj"),
        ("gpt2", {"hidden": 16}, "norms"),
        ("olmo2", {"heads": 2}, "norms its heads together"),
        ("olmo2", {"hidden": 16}, "leave hidden out|Leave hidden out"),
        ("gemma2", {"hidden": 16}, "Leave hidden out"),
    ],
)
def test_widths_that_a_model_cannot_have_are_refused(family: str, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        narrow(tiny(family), BATCHES, **sizes)
