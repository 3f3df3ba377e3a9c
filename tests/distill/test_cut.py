"""A cut model runs the very layers it names: what a config says of a layer by its number goes with the layer, or is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from draftsmith.distill import CutDraft, cut
from draftsmith.specdec.models import blocks
from tiny import FAMILIES, VOCABULARY, sharp, tiny

IDS = torch.tensor([[5, 9, 11, 4, 30, 31, 7, 8, 22, 23, 17, 3]])
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "pad_token_id": 2}


def sized(family: str, **changes: Any) -> PreTrainedModel:
    """A model of four layers whose config makes its lists and rules itself, as a published one does."""
    base = FAMILIES[family]()
    kept = {
        name: getattr(base, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    }
    kept |= {"head_dim": base.head_dim} if getattr(base, "head_dim", None) else {}
    config = type(base)(**{**kept, **SIZES, "bos_token_id": 1, "eos_token_id": 2, **changes})
    return sharp(config)


NUMBERED = {  # configs that say something of a layer by its number
    "gemma2": {"sliding_window": 3},
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}  # fmt: skip


class Through(nn.Module):
    """In the place of a layer: hands on what it is given."""

    def __init__(self, instead: nn.Module, pair: bool) -> None:
        super().__init__()
        self.pair = pair
        self.attention_type = getattr(instead, "attention_type", None)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if self.pair else hidden_states


def only(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """The target itself, every layer but `layers` handing on what it gets: numbers, masks and rules are its own."""
    model = copy.deepcopy(target)
    _name, stack = blocks(model)
    pairs = []
    stack[0].register_forward_hook(lambda module, args, out: pairs.append(isinstance(out, tuple)))
    logits(model)
    for number in range(len(stack)):
        if number not in layers:
            stack[number] = Through(stack[number], pairs[0])
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [0, 2], [1, 3], [1, 2], [2, 3], [3]])
@pytest.mark.parametrize("family", NUMBERED)
def test_what_a_config_says_of_a_layer_by_number_goes_with_it(family: str, layers: list[int], tmp_path: Path) -> None:
    target = sized(family, **NUMBERED[family])
    draft = cut(target, layers)
    assert torch.allclose(logits(draft), logits(only(target, layers)), atol=1e-5)
    draft.save_pretrained(tmp_path)  # and the config on disk says the same
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(logits(again), logits(draft))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_subset_runs_those_layers_in_order_and_all_of_them_are_the_target(family: str) -> None:
    target = tiny(family)
    assert torch.equal(logits(cut(target, [0, 1, 2])), logits(target))
    for layers in ([0, 2], [1, 2], [2]):
        assert torch.allclose(logits(cut(target, layers)), logits(only(target, layers)), atol=1e-5)


def test_a_layer_that_no_config_can_build_elsewhere_is_refused_by_name() -> None:
    target = tiny("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert torch.allclose(logits(cut(target, [0, 1])), logits(only(target, [0, 1])), atol=1e-5)  # at their own places
    with pytest.raises(ValueError, match=r"layer 2 of GPT2LMHeadModel as layer 1 .* attn\.scaling"):
        cut(target, [0, 2])


def test_a_draft_carries_the_targets_context_ids_and_generation_settings(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5000.0}
    target = sized("llama", rope_parameters=rope, max_position_embeddings=512, eos_token_id=[2, 7])
    target.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=[2, 7], pad_token_id=2, do_sample=True, temperature=0.6
    )
    CutDraft(target, [0, 3]).whole().save_pretrained(tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert draft.config.rope_parameters == target.config.rope_parameters
    assert draft.config.max_position_embeddings == 512
    assert (draft.config.bos_token_id, draft.config.eos_token_id, draft.config.pad_token_id) == (1, [2, 7], 2)
    assert draft.generation_config.to_diff_dict() == target.generation_config.to_diff_dict()
    # A published file may contradict itself (a temperature, and no sampling); its ids are kept.
    target.generation_config = GenerationConfig(eos_token_id=[2, 7], do_sample=False, temperature=0.6)
    CutDraft(target, [0, 3]).whole().save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == [2, 7]


def test_a_quantised_target_is_not_cut_but_named() -> None:
    target = tiny("llama")
    target.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(ValueError, match=r"quantised \(bitsandbytes\).*unquantised checkpoint"):
        cut(target, [0])
