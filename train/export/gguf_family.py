"""What of a model a .gguf can say: names, order and shapes as llama.cpp reads them; a setting that it would ignore is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFValueType, get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.specdec.models import pick
from draftsmith.train.export.gguf_tokenizer import Entry


class Family(NamedTuple):
    """`pairs`: q and k keep the two halves that rotary positions turn side by side, and not one after the other.
    `square`: attention is as wide as the model. `own_head`: a head is read even where it is the embedding."""

    arch: MODEL_ARCH
    pairs: bool = False
    square: bool = False
    own_head: bool = False


# By config.model_type, each as llama.cpp's src/models/*.cpp (0.5.0) reads it.
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, pairs=True),
    "mistral": Family(MODEL_ARCH.LLAMA, pairs=True),
    "smollm3": Family(MODEL_ARCH.SMOLLM3, pairs=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, square=True),
    "qwen3": Family(MODEL_ARCH.QWEN3),
    "olmo2": Family(MODEL_ARCH.OLMO2, square=True, own_head=True),
}
NO_ROPE_EVERY = 4  # layers of a SmolLM3, written into llama.cpp and not into the file


def family(config: Any) -> Family:
    """The family of a config, if everything in the config is something that llama.cpp does."""
    found = pick(FAMILIES, config.model_type, "model_type, of those that can be written as .gguf")
    rope = config.rope_parameters or {}
    heads, wide = config.num_attention_heads, head_dim(config)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    turned = [one if (one + 1) % NO_ROPE_EVERY else None for one in range(config.num_hidden_layers)]
    wrong = {
        f"hidden_act {config.hidden_act!r}: it has silu there": config.hidden_act != "silu",
        f"rope type {rope.get('rope_type')!r}": rope.get("rope_type", "default") not in _ROPES,
        "rope type llama3, which it knows in llama models only": rope.get("rope_type") == "llama3" and not found.pairs,
        "rotary positions for a part of a head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        f"a window of {window} of {config.max_position_embeddings} positions": bool(window)
        and window < config.max_position_embeddings,
        f"{heads} heads of {wide} in a model {config.hidden_size} wide": found.square and heads * wide != config.hidden_size,
        "biases in its attention": bool(getattr(config, "attention_bias", False)) and not found.pairs,
        "weights that are quantised already": getattr(config, "quantization_config", None) is not None,
        f"no_rope_layers {getattr(config, 'no_rope_layers', None)}: it leaves positions out of every {NO_ROPE_EVERY}th layer": any(
            bool(has) != (turn is not None)
            for has, turn in zip(getattr(config, "no_rope_layers", None) or [], turned, strict=False)
        ),
    }
    if said := [one for one, is_so in wrong.items() if is_so]:
        raise ValueError(
            f"llama.cpp has no such {config.model_type} model: {'; '.join(said)}. It would load the file and write other text; export another format"
        )
    return found


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def settings(config: Any, rows: int) -> list[Entry]:
    """The config as metadata; `rows` is how many ids the head gives logits to."""
    arch = MODEL_ARCH_NAMES[family(config).arch]
    integer, number = GGUFValueType.UINT32, GGUFValueType.FLOAT32
    rope = config.rope_parameters or {}
    whole = {
        "vocab_size": rows,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": head_dim(config),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
    }
    parts = {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": rope.get("rope_theta", 10000.0)}
    return [
        *(Entry(f"{arch}.{key}", int(value), integer) for key, value in whole.items()),
        *(Entry(f"{arch}.{key}", float(value), number) for key, value in parts.items()),
        *(one._replace(key=f"{arch}.rope.scaling.{one.key}") for one in _ROPES[rope.get("rope_type", "default")](rope)),
    ]


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of all that is in the file, as fp32; a tied head is the embedding, once."""
    config, held = model.config, model.state_dict()
    for name, theirs, heads in _named(model):
        value = held[name].detach().float()
        if not value.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite; nothing was written")
        yield theirs, paired(value, heads) if heads else value
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        wide = head_dim(config)
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, wide, 2, dtype=torch.float32) / wide)
        yield "rope_freqs.weight", plain / scaled  # llama.cpp divides by them


@torch.no_grad()
def with_numbers(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> PreTrainedModel:
    """A copy of the model that computes with the numbers of a file, `stored` by their names there: `tensors` backwards."""
    made = copy.deepcopy(model).float()
    own = made.state_dict()
    for name, theirs, heads in _named(model):
        value = stored[theirs]
        own[name].copy_(halved(value, heads) if heads else value)
    return made


def _named(model: PreTrainedModel) -> Iterator[tuple[str, str, int]]:
    """(name, name in the file, heads whose rows are paired or 0) of all that is written."""
    config = model.config
    found = family(config)
    names = get_tensor_name_map(found.arch, config.num_hidden_layers)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    turned = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads} if found.pairs else {}
    for name in model.state_dict():
        if name == "lm_head.weight" and tied and not found.own_head:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ValueError(f"{name} has no name in a .gguf of a {config.model_type}; nothing was written")
        yield name, theirs, next((heads for part, heads in turned.items() if part in name), 0)


def paired(value: Tensor, heads: int) -> Tensor:
    """Rows [heads * wide, ...] of q or k: transformers turns row i with row i + wide / 2 of a head, llama.cpp row 2i with row 2i + 1."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def halved(value: Tensor, heads: int) -> Tensor:
    """`paired` undone."""
    return value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _linear(rope: dict[str, Any]) -> list[Entry]:
    return [
        Entry("type", rope["rope_type"], GGUFValueType.STRING),
        Entry("factor", float(rope["factor"]), GGUFValueType.FLOAT32),
    ]


def _yarn(rope: dict[str, Any]) -> list[Entry]:
    if odd := [one for one in ("attention_factor", "mscale", "mscale_all_dim", "truncate") if rope.get(one) is not None]:
        raise ValueError(f"a yarn rope with its own {', '.join(odd)} is not written: llama.cpp computes it from the factor alone")
    betas = {"yarn_beta_fast": rope.get("beta_fast"), "yarn_beta_slow": rope.get("beta_slow")}
    return [
        *_linear(rope),
        Entry("original_context_length", int(rope["original_max_position_embeddings"]), GGUFValueType.UINT32),
        *(Entry(key, float(value), GGUFValueType.FLOAT32) for key, value in betas.items() if value is not None),
    ]


_ROPES = {"default": lambda rope: [], "linear": _linear, "yarn": _yarn, "llama3": lambda rope: []}
