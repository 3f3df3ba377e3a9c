"""Parameters and caches counted from a config alone equal those of models that were built and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    T5Config,
)

from draftsmith.distill.making.cut import cut
from draftsmith.eval.plan.drafts import draft_named
from draftsmith.eval.plan.sizes import Size, first, read_config, size_of, trimmed
from tiny import FAMILIES, tiny

SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
MORE = {
    "llama, tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=512),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
EVERY: dict[str, Any] = FAMILIES | MORE


def counted(config: Any, folder: Path) -> Size:
    """By way of a folder that holds config.json and nothing else."""
    config.save_pretrained(folder)
    assert [one.name for one in folder.iterdir()] == ["config.json"]
    return size_of(read_config(str(folder)), "model")


@pytest.mark.parametrize("family", EVERY)
def test_parameters_and_cache_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    config = EVERY[family]()
    size = counted(config, tmp_path)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    named = dict(model.named_parameters())
    of = lambda *words: sum(one.numel() for name, one in named.items() if any(word in name for word in words))  # noqa: E731
    assert size.parameters == sum(one.numel() for one in named.values())
    assert size.embedding == of("embed_tokens", "wte")
    assert size.head == of("lm_head")
    assert size.layers == of("layers.", ".h.")
    assert sum(one.experts for one in size.blocks) == of(".experts.")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.arange(7)[None] + 3, past_key_values=cache, use_cache=True)
    assert size.cache(7) == sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


PUBLISHED: dict[str, tuple[Any, int]] = {
    "Llama-3.1-8B": (
        LlamaConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
        8_030_261_248,
    ),
    "Llama-3.2-1B": (
        LlamaConfig(
            vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "Qwen2.5-0.5B": (
        Qwen2Config(
            vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, tie_word_embeddings=True,
        ),
        596_049_920,
    ),
    "Mistral-7B-v0.1": (
        MistralConfig(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        MixtralConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            num_local_experts=8, num_experts_per_tok=2,
        ),
        46_702_792_704,
    ),
    "gemma-2-2b": (
        Gemma2Config(
            vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
            head_dim=256,
        ),
        2_614_341_888,
    ),
    "Phi-3-mini": (
        Phi3Config(vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32),
        3_821_079_552,
    ),
    "SmolLM3-3B": (
        SmolLM3Config(
            vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        3_075_098_624,
    ),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1,
        ),
        30_532_122_624,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_ten_published_models_have_their_published_size_and_that_of_transformers(name: str) -> None:
    config, parameters = PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert size_of(config, name).parameters == parameters == sum(one.numel() for one in model.parameters())


def test_a_call_reads_the_head_once_and_looks_the_embedding_up() -> None:
    tied, own = (size_of(LlamaConfig(**SMALL, tie_word_embeddings=one), "m") for one in (True, False))
    assert tied.head == 0
    assert tied.active == own.active == own.parameters - own.embedding


def test_experts_are_read_as_far_as_tokens_hit_them() -> None:
    size = size_of(MORE["mixtral"](), "m")
    experts = sum(one.experts for one in size.blocks)
    dense = size.parameters - size.embedding - experts
    assert size.active == pytest.approx(dense + experts * 2 / 4)
    assert size.outer + size.touched(2) == pytest.approx(dense + experts * 3 / 4)  # a half, and a half of what was left
    assert size.outer + size.touched(200) == pytest.approx(dense + experts)


def test_windows_bound_the_cache() -> None:
    size = size_of(Gemma3TextConfig(**SMALL | {"num_hidden_layers": 6}, head_dim=8, sliding_window=16), "m")
    token = 2 * 2 * 8
    assert [one.window for one in size.blocks] == [16] * 5 + [None]
    assert size.cache(100) == token * (5 * 16 + 100)
    assert size.cache(10) == token * 60
    assert size.attention(100) == 4 * 4 * 8 * (5 * 16 + 100)


def test_latent_attention_keeps_its_latent() -> None:
    config = DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4}, moe_intermediate_size=16, first_k_dense_replace=1, n_routed_experts=4, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1, num_experts_per_tok=2,
    )  # fmt: skip
    size = size_of(config, "m")
    assert size.cache(5) == 3 * 5 * (8 + 4)
    routed = 4 * 3 * 32 * 16  # the shared expert beside them is every token's, so it is none of them
    assert [one.experts for one in size.blocks] == [0, routed, routed]


def test_first_layers_are_what_a_cut_makes() -> None:
    target = tiny("qwen3")
    size = size_of(target.config, "target")
    for layers in (1, 2):
        made = cut(target, list(range(layers)))
        assert first(size, layers, "d").parameters == sum(one.numel() for one in made.parameters())
        draft = draft_named(f"layers:{layers}", size)
        assert sum(draft.own) == first(size, layers, "d").parameters
    assert draft_named("exit:2", size).own == (size.width**2 + size.rest, 0)  # it shares all the rest with the target
    with pytest.raises(ValueError, match=r"exit:4: target has layers 1\.\.3"):
        draft_named("exit:4", size)


def test_a_trimmed_head() -> None:
    tied = size_of(MORE["llama, tied"](), "m")
    own = size_of(LlamaConfig(**SMALL), "m")
    assert trimmed(tied, 20).parameters == tied.parameters + 20 * 32  # its embedding stays whole, so the rows are cut out beside it
    assert trimmed(own, 20).parameters == own.parameters - 41 * 32
    assert trimmed(own, 20).active == own.active - 41 * 32
    assert draft_named("exit:1", own, 20).own == (32**2 + 32 + 20 * 32, 0)
    with pytest.raises(ValueError, match="a draft vocabulary of 62 asked; the head of m has 61 rows"):
        trimmed(own, 62)
    with pytest.raises(ValueError, match="ngram has no head that a draft vocabulary of 20 could trim"):
        draft_named("ngram", own, 20)


@pytest.mark.parametrize("name", ["exit:no", "layers:0", "cost:", "cost:-1"])
def test_a_draft_without_its_number(name: str) -> None:
    with pytest.raises(ValueError, match="behind the colon; write"):
        draft_named(name, size_of(LlamaConfig(**SMALL), "m"))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with an encoder; only models of one stack of decoder layers"):
        size_of(T5Config(), "m")
    with pytest.raises(ValueError, match="what they remember cannot be rolled back"):
        size_of(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1), "m")
    config = LlamaConfig(**SMALL)
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layers of kind linear_attention: .* cannot be rolled back"):
        size_of(config, "m")
    with pytest.raises(FileNotFoundError, match=r"a folder without config\.json; name a hub id"):
        read_config(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_config(str(tmp_path / "gone.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    with pytest.raises(ValueError, match=r"no config that transformers .* can read"):
        read_config(str(tmp_path / "config.json"))
