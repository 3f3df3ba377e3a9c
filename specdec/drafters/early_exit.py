"""The target's own first layers draft: an early exit is a shorter model of the same class, so the model drafter drives it."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel

from draftsmith.specdec.drafters.model import ModelDrafter
from draftsmith.specdec.models import blocks, output_rows, shell


def exit_view(target: PreTrainedModel, layer: int, head: nn.Module | None = None) -> PreTrainedModel:
    """A shallow copy of `target` that stops after `layer` layers (1..L): every module is shared, none is copied or changed.

    `head` replaces the output head; the target's final norm stays before it.
    """
    name, layers = blocks(target)
    body = getattr(target, target.base_model_prefix)
    if any("forward" in vars(one) for one in (target, body)):
        raise ValueError(
            f"{type(target).__name__} has a wrapped forward (compiled, or with hooks), which would run all its layers; exit it before"
        )
    if not 1 <= layer <= len(layers):
        raise ValueError(f"exit after layer {layer} asked; {type(target).__name__} has layers 1..{len(layers)}")
    view, short = shell(target), shell(body)
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layer]
    text.num_hidden_layers = layer
    view.config = short.config = config
    setattr(short, name, nn.ModuleList(layers[:layer]))
    setattr(view, target.base_model_prefix, short)
    if head is not None:
        view.set_output_embeddings(head)
    return view


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first `layer` layers of the target and its own norm and head (or `head`), in a cache of its own."""

    def __init__(self, target: PreTrainedModel, layer: int, head: nn.Module | None = None, vocab_size: int | None = None) -> None:
        super().__init__(exit_view(target, layer, head), vocab_size=vocab_size or output_rows(target))
        self.layer = layer
