"""What an exit costs beside its target: the bytes that it adds, and the share of a target's step that its own step reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from draftsmith.specdec.drafters.exit_heads import ExitHead
from draftsmith.specdec.models import blocks


def added_bytes(heads: Iterable[nn.Module]) -> int:
    """What heads take beside the target, as they are now; a block's cache comes to it, as of one more layer."""
    return sum(one.numel() * one.element_size() for head in heads for one in head.parameters())


def copied_bytes(target: PreTrainedModel, ids: int) -> int:
    """What a draft that says `ids` ids alone copies of the target's output head, once a loaded exit."""
    rows: Any = target.get_output_embeddings()
    return ids * sum(one[0].numel() * one.element_size() for one in rows.parameters())


def share_of_a_step(target: PreTrainedModel, layer: int, head: ExitHead, ids: int | None = None) -> float:
    """Weights that a drafted token reads over those that a token of the target reads: the c of memory-bound decoding.

    `ids`: rows of the output head that the draft reads, where not all. Experts count in full on both sides.
    """
    layers, output = [_size(one) for one in blocks(target)[1]], target.get_output_embeddings()
    rows: Any = output.weight
    drafts = sum(layers[:layer]) + _size(head) + rows.shape[1] * (rows.shape[0] if ids is None else ids)
    return drafts / (sum(layers) + rows.numel())


def memory_bound_speed_up(tokens: float, k: int, share: float) -> float:
    """`tokens` a call over what a call reads, in steps of the target, where `k` are drafted (MBSU, Goel et al. 2403.00858)."""
    return tokens / (1 + k * share)


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())
