"""What a target says after some of its layers, as its final norm would show it, from one forward over all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import last_hidden
from draftsmith.specdec.models import blocks

NORMS = ("norm", "ln_f", "final_layernorm")


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between a model's last block and its head."""
    body = getattr(model, model.base_model_prefix)
    for name in NORMS:
        if isinstance(getattr(body, name, None), nn.Module):
            return getattr(body, name)
    raise ValueError(
        f"{type(model).__name__} keeps its final norm under none of {', '.join(NORMS)}; its exits cannot be fitted here"
    )


@torch.no_grad()
def states(target: PreTrainedModel, layers: list[int], batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
    """The final hidden states at the scored positions [N, H], and those after each of `layers` (1..L) through the final norm."""
    _, stack = blocks(target)
    if wrong := [one for one in layers if not 1 <= one <= len(stack)]:
        raise ValueError(f"exits after layers {wrong} asked; {type(target).__name__} has layers 1..{len(stack)}")
    norm = final_norm(target)
    ids, scored = batch.ids.to(target.device), batch.scored.to(target.device)
    after: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            after[layer] = (output[0] if isinstance(output, tuple) else output)[scored]

        return hook

    handles = [stack[layer - 1].register_forward_hook(keep(layer)) for layer in layers]
    try:
        last = last_hidden(target, ids)[scored]
    finally:
        for handle in handles:
            handle.remove()
    return last, {layer: norm(hidden) for layer, hidden in after.items()}
