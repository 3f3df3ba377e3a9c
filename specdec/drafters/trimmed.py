"""A draft that says a part of the target's ids only: its head is cut to their rows, its embedding stays whole, for it reads any token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.specdec.models import shell

# Not .safetensors: vLLM and SGLang read every file of that ending in a draft's folder as weights.
FILE = "draft_ids.json"


def check_ids(ids: Tensor, rows: int, what: str = "ids") -> Tensor:
    """`ids` [V'] as int64; ValueError unless they ascend within 0..rows-1. Sorted, the lowest of equal logits is the lowest id."""
    ids = torch.as_tensor(ids)
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or bool((ids[1:] <= ids[:-1]).any()):
        raise ValueError(f"{what} must be a list of ids in ascending order, each once, found {_some(ids)}")
    if int(ids[0]) < 0 or int(ids[-1]) >= rows:
        raise ValueError(f"{what} are {int(ids[0])}..{int(ids[-1])}; the ids that can be said are 0..{rows - 1}")
    return ids.long()


def trimmed_view(model: PreTrainedModel, ids: Tensor) -> PreTrainedModel:
    """A shallow copy of `model` whose head gives logits for `ids` [V'] alone; all else is shared, and nothing is changed."""
    if "forward" in vars(model):
        raise ValueError(
            f"{type(model).__name__} has a wrapped forward (compiled, or with hooks), which would keep its head; trim it before"
        )
    own: Any = model.get_output_embeddings()
    where = ids.to(own.weight.device)
    head = nn.Linear(own.weight.shape[1], len(ids), bias=getattr(own, "bias", None) is not None, device="meta")
    for name, _ in list(head.named_parameters()):
        setattr(head, name, nn.Parameter(getattr(own, name).detach()[where].contiguous(), requires_grad=False))
    if isinstance(own, nn.Linear):
        head.__class__ = type(own)  # prepared for decoding where the whole head is
    view = shell(model)
    view.set_output_embeddings(head)
    return view


def write_ids(folder: Path, ids: Tensor) -> dict[str, str]:
    """Put the ids into the draft's folder; the settings by which `load_drafter` finds them."""
    (folder / FILE).write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")
    return {"ids": FILE}


def read_ids(path: Path, rows: int) -> Tensor:
    """The ids of a draft's folder: [V']."""
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} does not exist, and the drafter.json beside it names it: copy it there, or take `ids` out of the settings to draft "
            "with the whole head"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error.msg} at line {error.lineno})") from error
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError(f"{path} must hold a list of ids, found {str(ids)[:60]}")
    return check_ids(torch.tensor(ids, dtype=torch.long), rows, f"the ids of {path}")


def _some(ids: Tensor) -> str:
    return f"{list(ids.shape)} of {ids.dtype}: {ids.flatten()[:6].tolist()}{' ...' if ids.numel() > 6 else ''}"
