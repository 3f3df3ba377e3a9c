"""What a target says after some of its layers, from one forward over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.head import last_hidden
from draftsmith.specdec.models import blocks, final_norm


class Call(NamedTuple):
    """What a layer is called with besides the stream: masks and positions, as the family hands them on."""

    asked: tuple[Any, ...]
    named: dict[str, Any]


class Seen(NamedTuple):
    """Of one forward: the final states at the scored positions [N, H], the stream behind layers [B, T, H], and the calls of the layers after."""

    last: Tensor
    after: dict[int, Tensor]
    next: dict[int, Call]


@torch.no_grad()
def watch(target: PreTrainedModel, layers: Iterable[int], nexts: Iterable[int], batch: Batch) -> Seen:
    """Run the target once over the batch: the stream after each of `layers` (1..L), and what the layer behind each of `nexts` is called with."""
    _, stack = blocks(target)
    layers = list(layers)
    if wrong := [one for one in layers if not 1 <= one <= len(stack)]:
        raise ValueError(f"exits after layers {wrong} asked; {type(target).__name__} has layers 1..{len(stack)}")
    batch = batch.to(target.device)
    after: dict[int, Tensor] = {}
    calls: dict[int, Call] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            after[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def listen(layer: int) -> Any:
        def hook(_module: nn.Module, asked: Any, named: Any) -> None:
            calls[layer] = Call(asked[1:], named)  # the first is the stream, which `after` has

        return hook

    handles = [stack[one - 1].register_forward_hook(keep(one)) for one in layers]
    try:
        handles += [stack[one].register_forward_pre_hook(listen(one), with_kwargs=True) for one in nexts]
        last = last_hidden(target, batch.ids, batch.documents)[batch.scored]
    finally:
        for handle in handles:
            handle.remove()
    return Seen(last, after, calls)


@torch.no_grad()
def states(target: PreTrainedModel, layers: list[int], batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
    """The final hidden states at the scored positions [N, H], and those after each of `layers` (1..L) through the final norm."""
    norm, scored = final_norm(target)[1], batch.scored.to(target.device)
    seen = watch(target, layers, (), batch)
    return seen.last, {layer: norm(hidden[scored]) for layer, hidden in seen.after.items()}
