"""The columns of a stored teacher: one row a training row, and in it flat lists over its scored positions, two bytes a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Features, List, Value
from torch import Tensor

from draftsmith.distill.top_k import Listened

About = dict[str, Any]
# On SmolLM2-135M at k = 32 it moves a forward KL of 0.10 nats by 0.00003 on average, and is 0.0000001 nats from the law itself;
# float32 would add half to the size.
ROUNDED = "float16"
FEW = 1 << 16  # ids below this take two bytes


def features(about: About) -> Features:
    ids = "uint16" if about["vocabulary"] <= FEW else "uint32"
    wanted = {"ids": ids, "log_p": ROUNDED, "log_rest": ROUNDED, "log_sum_exp": "float32"} | dict.fromkeys(_asked(about), ROUNDED)
    return Features({"key": Value("string")} | {name: List(Value(dtype)) for name, dtype in wanted.items()})


def bytes_a_position(about: About) -> tuple[int, int]:
    """About what one position takes in parquet, and in the copy of it that is mapped into memory to be read."""
    others = 4 + 2 * (1 + len(_asked(about)))
    if about["vocabulary"] <= FEW:
        return about["k"] * 4 + others, about["k"] * 4 + others
    # In parquet an id is its place in a dictionary: up to 18 bits of the largest vocabularies.
    return about["k"] * 9 // 2 + others, about["k"] * 6 + others


def to_table(keys: list[str], said: list[Listened], about: About) -> pa.Table:
    """What was said of some rows. The rest is kept too: 1 - sum exp(log_p) of rounded numbers would lose the small ones."""
    form = features(about)
    columns = {
        "ids": [one.ids for one in said],
        "log_p": [one.log_p for one in said],
        "log_rest": [one.rest() for one in said],
        "log_sum_exp": [one.log_sum_exp for one in said],
    } | {name: [getattr(one, name) for one in said] for name in _asked(about)}
    schema = form.arrow_schema
    arrays = [pa.array(keys, pa.string())]
    for name in form:
        if name != "key":
            flat = [_flat(one).astype(form[name].feature.dtype) for one in columns[name]]
            starts = np.cumsum([0, *(len(one) for one in flat)], dtype=np.int32)
            arrays.append(pa.ListArray.from_arrays(pa.array(starts), pa.array(np.concatenate(flat))).cast(schema.field(name).type))
    return pa.Table.from_arrays(arrays, schema=schema)


def to_listened(table: pa.Table, about: About, device: torch.device) -> Listened:
    """The positions of all rows of the table, one after another; the rounded chances are made to sum to one with their rest."""

    def column(name: str) -> Tensor:
        parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(name).chunks]
        flat = np.concatenate(parts) if parts else np.zeros(0)
        return torch.from_numpy(flat.astype(np.int64 if name == "ids" else np.float32)).to(device)

    ids, log_p = (column(name).reshape(-1, about["k"]) for name in ("ids", "log_p"))
    log_p = log_p - torch.cat([log_p, column("log_rest")[:, None]], -1).logsumexp(-1, keepdim=True)
    return Listened(ids, log_p, column("log_sum_exp"), **{name: column(name) for name in _asked(about)})


def checked(said: Listened, scored: int, about: About) -> Listened:
    """ValueError where an answer is not what was asked; a server may send anything."""
    k, sizes = about["k"], [tuple(one.shape) for one in said[:3] if one is not None]
    if sizes != [(scored, k), (scored, k), (scored,)]:
        raise ValueError(
            f"asked for the {k} likeliest ids at {scored} scored positions of a row; the target's answer has shapes {sizes}"
        )
    if lacking := [name for name in _asked(about) if getattr(said, name) is None]:
        raise ValueError(
            f"the store is to hold {', '.join(lacking)}, which the target's answer lacks: a target that names its likeliest ids "
            "only cannot tell it; take temperature 1 and no support"
        )
    law = said.log_p.double()
    if law.isnan().any() or (law.diff(dim=-1) > 0).any() or (law.exp().sum(-1) > 1.001).any():
        raise ValueError("the target's answer is no law: log_p must fall along each position, and the chances sum to at most 1")
    if said.ids.min() < 0 or said.ids.max() >= about["vocabulary"] or (said.ids.sort(-1).values.diff(dim=-1) == 0).any():
        raise ValueError(f"the target's answer names an id twice at a position, or one that is not in 0..{about['vocabulary'] - 1}")
    return said


def _asked(about: About) -> list[str]:
    """The columns that are there only where a recipe needs them."""
    return ["tempered"] * (about["temperature"] != 1) + ["supported"] * (about["support"] is not None)


def _flat(one: Tensor) -> Any:
    return one.detach().cpu().numpy().reshape(-1)
