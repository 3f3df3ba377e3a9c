"""Several rows in one sequence, none of which reads another: a mask of blocks on the diagonal, and positions that begin anew.

Positions alone do not do it: what a family makes of them differs, and a mask that is given is obeyed by all that are let in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

SLACK = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest hidden state; other dtypes keep two digits


def positions(documents: Tensor) -> Tensor:
    """Places within each document: documents [B, T] -> [B, T]."""
    columns = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = documents != documents.roll(1, dims=1)
    first[:, :1] = True
    return columns - torch.where(first, columns, 0).cummax(dim=1).values


def apart(documents: Tensor | None, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a model's body is called with besides its ids, so that no document reads another; nothing where each has its own row.

    `documents` [B, T] as in `Batch`; padding is a document of its own, so that no row of the mask is empty.
    """
    if documents is None:
        return {}
    seen = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]  # [B, 1, T, T]
    how = config._attn_implementation
    if how == "eager":  # it adds the mask to the scores
        seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    elif how != "sdpa":
        raise ValueError(f"rows cannot share a sequence under {how} attention; load the models with sdpa or eager, or do not pack")
    return {"attention_mask": seen, "position_ids": positions(documents)}


@torch.no_grad()
def check_packing(model: PreTrainedModel, longest: int) -> None:
    """Refuse a family whose rows read each other when they share a sequence, or rows of `longest` tokens that outgrow its window.

    It is tried: the hidden states of a short text behind another one must be those of the text alone.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    window = next((size for key in ("sliding_window", "attention_chunk_size") if (size := getattr(text, key, None))), None)
    if window is not None and longest > window:
        raise ValueError(
            f"{name} attends to windows of {window} tokens, and packed rows of up to {longest} tokens would need its windows in their "
            f"mask; pack rows of at most {window} tokens (data.max_length), or do not pack"
        )
    body: Any = getattr(model, model.base_model_prefix)
    training = model.training
    model.eval()
    ids = torch.arange(3, 12, device=model.device) % text.vocab_size
    documents = torch.tensor([[0] * 5 + [1] * 4], device=model.device)
    asked = apart(documents, model.config, model.dtype)
    try:
        alone = body(input_ids=ids[None, 5:], use_cache=False).last_hidden_state
        behind = []
        for before in (ids[:5], ids[:5].flip(0)):
            packed = torch.cat([before, ids[5:]])[None]
            out = body(input_ids=packed, use_cache=False, **asked)
            behind.append(out.last_hidden_state[:, 5:])
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be given a mask and positions ({error}), so its rows cannot share a sequence; do not pack"
        ) from error
    finally:
        model.train(training)
    slack = SLACK.get(model.dtype, 1e-2) * float(alone.abs().max())
    for one, other, why in ((*behind, "what stands before it"), (alone, behind[0], "where it stands")):
        if float((one - other).abs().max()) > slack:
            raise ValueError(f"{name} lets a text that shares a sequence depend on {why}, mask or not; do not pack its rows")
