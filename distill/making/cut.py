"""Fewer layers of a target, as a plain model of its class: a layer that is kept is built as it was, or the cut is refused."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from draftsmith.specdec.models import blocks

PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # lists of a config, one entry a layer
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_layers(target: PreTrainedModel, layers: list[int]) -> None:
    """ValueError where `target` cannot be cut to `layers`."""
    check_weights(target)
    _, stack = blocks(target)
    if not layers or any(not 0 <= one < len(stack) for one in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"layers {layers} asked; {type(target).__name__} has layers 0..{len(stack) - 1}, each at most once")


def check_weights(target: PreTrainedModel) -> None:
    """ValueError where the layers of `target` hold quantised weights, which can be copied but not taught."""
    if (how := getattr(target.config, "quantization_config", None)) is not None:
        told = how if isinstance(how, dict) else how.to_dict()
        raise ValueError(
            f"{target.config.name_or_path or type(target).__name__} is quantised ({told.get('quant_method', 'unknown')}): its layers cannot be "
            "taught as they are. Name its unquantised checkpoint as target.model, or start from a smaller model of its family "
            "(draft.kind: checkpoint), which a quantised target may teach"
        )


def cut(target: PreTrainedModel, layers: list[int], tied: bool = True) -> PreTrainedModel:
    """A model of the target's class that has only its `layers` (from 0), with copies of everything else.

    `tied=False` gives it an output head of its own where the target's is its embedding.
    """
    check_layers(target, layers)
    name, stack = blocks(target)
    config = _config(target, layers)
    draft = build(config if tied else untied(config), target)
    for new, (old, layer) in enumerate(zip(layers, blocks(draft)[1], strict=True)):
        _check_alike(stack[old], layer, f"layer {old} of {type(target).__name__} as layer {new} of a draft")
    state, prefix = {}, f"{target.base_model_prefix}.{name}."
    places = {str(old): str(new) for new, old in enumerate(layers)}
    for key, value in target.state_dict().items():
        if key.startswith(prefix):
            number, _, rest = key[len(prefix) :].partition(".")
            if number in places:
                # Of a sharded target all processes cut the same layers together: what they hold of one is put together on each.
                state[f"{prefix}{places[number]}.{rest}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
        else:
            state[key] = value
    draft.load_state_dict(state, strict=True)
    return draft


def build(config: Any, target: PreTrainedModel) -> PreTrainedModel:
    """A model of `config`, weights to be loaded, in the target's dtype and place, with its special ids and generation settings."""
    with target.device, no_init_weights():  # drawing weights that are then loaded took a fifth of a checkpoint
        draft: Any = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    draft.tie_weights()  # it is part of the drawing
    speak_like(draft, target)
    return draft.eval()


def untied(config: Any) -> Any:
    """The config of the same model with an output head of its own."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def speak_like(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `draft` the special ids and the generation settings of `target`."""
    for name in SPECIAL:
        setattr(draft.config, name, getattr(target.config, name, None))
    settings: Any = copy.deepcopy(target.generation_config)
    try:
        settings.validate(strict=True)
    except ValueError:  # some published ones contradict themselves, and transformers would refuse to save them again
        settings = GenerationConfig(**{name: getattr(settings, name) for name in SPECIAL})
    draft.generation_config = settings


def _config(target: PreTrainedModel, layers: list[int]) -> Any:
    """The target's config for `layers` only: what it says of a layer by number follows the layer to its new place."""
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    for name in PER_LAYER:
        if each := getattr(text, name, None):
            setattr(text, name, [each[one] for one in layers])
    if getattr(text, "max_window_layers", None) is not None and getattr(text, "layer_types", None):
        sliding = [new for new, kind in enumerate(text.layer_types) if kind == "sliding_attention"]
        text.max_window_layers = min(sliding, default=len(layers))
    if getattr(text, "decoder_sparse_step", None) is not None:  # every so many layers has experts, but for the ones that are named
        step, named = text.decoder_sparse_step, text.mlp_only_layers or []
        text.mlp_only_layers = [new for new, old in enumerate(layers) if old in named or (old + 1) % step]
        text.decoder_sparse_step = 1
    text.num_hidden_layers = len(layers)
    return config


def _check_alike(old: nn.Module, new: nn.Module, which: str) -> None:
    before, now = _built(old), _built(new)
    different = [what for what in before.keys() | now.keys() if before.get(what) != now.get(what)]
    if different:
        first = min(different)
        raise ValueError(
            f"{which} would be built otherwise: {first} is {before.get(first)}, and would be {now.get(first)}; no config of this class "
            "can say so. Layers at their own places (first:N) can be cut; so can a model loaded without quantisation or adapters"
        )


def _built(layer: nn.Module) -> dict[str, Any]:
    """A layer beside its weights: the class and the plain values of each module in it, but for the layer's own number."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        found[f"{name or 'the layer'} (class)"] = type(module).__name__.removeprefix("FSDP")  # torch's word for one that is sharded
        for what, value in vars(module).items():
            if not what.startswith("_") and what not in _FREE and isinstance(value, bool | int | float | str | None):
                found[f"{name}.{what}".lstrip(".")] = value
    return found


_FREE = ("layer_idx", "layer_id", "training", "gradient_checkpointing")
