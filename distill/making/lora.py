"""Low-rank adapters on a draft, through peft: they alone are trained, and what is saved is a plain model with them added in."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

ADAPTER = "default"


def with_lora(
    model: PreTrainedModel, rank: int = 16, alpha: int = 32, targets: Sequence[str] | str = "all-linear"
) -> PreTrainedModel:
    """Put adapters of `rank` on the linear layers named in `targets` (all but the head), IN PLACE, and freeze the rest (LoRA, 2106.09685).

    The update of a weight is (alpha / rank) B A with B = 0, so the model says at first what it said before. The adapters are
    fp32, whatever the model is.
    """
    if adapted(model):
        raise ValueError(f"{type(model).__name__} has adapters already; merge them first (distill.lora.merged)")
    outer = [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets if isinstance(targets, str) else list(targets))
    if not isinstance(targets, str) and model.config.get_text_config().tie_word_embeddings:
        names = {name.rpartition(".")[2] for name, one in model.named_modules() if any(one is two for two in outer)}
        if both := sorted(names & set(targets)):
            raise ValueError(
                f"adapters on {', '.join(both)} asked, and this model's head is its embedding: the sum could not be merged into one "
                "matrix. Name other layers"
            )
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.Linear)})
        raise ValueError(f"adapters on {targets} asked; this model's linear layers are {', '.join(linear)} ({error})") from error
    for one in model.parameters():
        if one.requires_grad:
            one.data = one.data.float()
    return model


@contextlib.contextmanager
def made_where_they_stay() -> Iterator[None]:
    """Adapters are put in without being moved to their layer's device, for tensors that have shapes and no numbers cannot be moved."""
    move = nn.Module.to
    nn.Module.to = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


def adapted(model: nn.Module) -> bool:
    return any(isinstance(one, BaseTunerLayer) for one in model.modules())


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model that says what the adapted one says. A copy: merging in place and back would round the weights of `model`."""
    plain = copy.deepcopy(model)
    layers = {name: one for name, one in plain.named_modules() if isinstance(one, LoraLayer)}
    for layer in layers.values():
        layer.merge()
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        if parent not in layers:  # experts carry one adapter around another
            setattr(plain.get_submodule(parent), child, layer.get_base_layer())
    plain.__dict__.pop("peft_config", None)
    return plain.requires_grad_(True).eval()
