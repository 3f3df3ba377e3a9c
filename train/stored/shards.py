"""What a teacher says is kept in shards: the same rows give the same shards in any order, and a row of any batch finds itself again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from draftsmith.distill.batch import Batch, Example, Row, example


class Place(NamedTuple):
    """What a row is found by, and how many positions of it are scored."""

    key: bytes
    scored: int


def shards(rows: Sequence[Row], size: int) -> list[list[Example]]:
    """Rows of like length together, `size` to a shard."""
    ordered = sorted((example(row) for row in rows), key=lambda row: (len(row.ids), row))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def places(batch: Batch) -> list[Place]:
    """Of each row of the batch in which anything is scored; a row's padding and its neighbours are no part of its key."""
    found = []
    for ids, scored in batch.to(torch.device("cpu")).rows():
        if count := int(scored.sum()):
            said = ids.numpy().tobytes() + scored.numpy().tobytes()
            found.append(Place(hashlib.blake2b(said, digest_size=16).digest(), count))
    return found


def fingerprint(what: Any) -> str:
    """sha256 of anything that json can write."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()
