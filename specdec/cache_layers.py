"""What transformers' cache can hold and give back, found out by trying: versions differ, and their numbers do not say in what."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig

ROLLS_BACK = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # for transformers that have no `is_croppable` yet


class UpperLayers(DynamicCache):
    """The cache of a model's layers from number `above` on; the model's own layers name theirs by the number in the whole."""

    def __init__(self, config: Any, above: int) -> None:
        super().__init__(config=config)
        self.above = above
        del self.layers[:above]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return super().update(key_states, value_states, layer_idx - self.above, *more, **named)


def new_cache(config: Any, above: int = 0) -> DynamicCache:
    """An empty cache for the layers of `config`'s model from number `above` on."""
    cache = UpperLayers(config, above) if above else DynamicCache(config=config)
    if records_past():
        cache.activate_past_recording()  # sliding layers keep what a rollback needs; before the first forward
    return cache


def gives_nothing_back(cache: DynamicCache) -> str | None:
    """The class of a layer that cannot forget, or None where all can."""
    for layer in cache.layers:
        if not getattr(layer, "is_croppable", type(layer).__name__ in ROLLS_BACK):
            return type(layer).__name__
    return None


@functools.cache
def records_past() -> bool:
    """Whether this transformers can roll sliding layers back exactly; versions up to 5.12 never can, and some after it fail
    where a second forward comes before the rollback. So it is tried."""
    cache = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=2))
    if not hasattr(cache, "activate_past_recording"):
        return False
    cache.activate_past_recording()
    for width, wanted in ((3, 3), (2, 3)):  # the window's one token before the block, and the block
        keys, _ = cache.update(torch.zeros(1, 1, width, 1), torch.zeros(1, 1, width, 1), 0)
        if keys.shape[-2] != wanted:
            return False
    return True


def positions(config: Any) -> int | None:
    """How many tokens a row may hold, or None where nothing limits it.

    Rotary scalings that change with the length of the call (longrope, dynamic) are served up to where they change: a block
    that crosses it would turn the positions of tokens before it, and keys cached earlier keep the old ones.
    """
    limit: Any = getattr(config, "max_position_embeddings", None) or None
    scaling = getattr(config, "rope_parameters", None) or {}
    for one in (scaling, *(value for value in scaling.values() if isinstance(value, dict))):
        if one.get("rope_type") in ("longrope", "dynamic"):
            changes_at = (
                one.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None) or limit
            )
            limit = min(one for one in (limit, changes_at) if one)
    return limit
