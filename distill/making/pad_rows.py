"""A draft's vocabulary brought to the target's number of rows: ids that no tokenizer knows get a row that is never the likeliest."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.models import output_rows


@torch.no_grad()
def with_rows(model: PreTrainedModel, rows: int, real: int | None = None) -> PreTrainedModel:
    """`model` with exactly `rows` ids, of which the first `real` (all that it has: None) keep their rows; a copy, unless it is so already.

    A row beyond is the mean of the real ones, so its logit is the mean of theirs: it can't be the greatest, and by Jensen its
    chance is at most 1 in `real`. Zeros would promise neither.
    """
    had = output_rows(model)
    real = min(had, rows) if real is None else real
    if not 0 < real <= min(had, rows):
        raise ValueError(
            f"{real} real ids asked of a draft of {had} rows for a target of {rows}; each needs a row for every real id"
        )
    if had == rows == real:
        return model
    model = copy.deepcopy(model)
    model.resize_token_embeddings(rows, mean_resizing=False)
    embedding, head = (getattr(model, name)() for name in ("get_input_embeddings", "get_output_embeddings"))
    for weight in _each(embedding.weight, head.weight, getattr(head, "bias", None)):
        weight[real:] = weight[:real].float().mean(0).to(weight.dtype)
    return model


def _each(*weights: Any) -> list[Tensor]:
    """Those that are there, a tied one once."""
    return list({id(one): one for one in weights if one is not None}.values())
