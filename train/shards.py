"""What a teacher says is kept in shards: the same rows give the same shards in any order, and a row of any batch finds itself again."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from draftsmith.distill import Batch
from draftsmith.train.data import Example


class Place(NamedTuple):
    """What a row is found by, and how many positions of it are scored."""

    key: bytes
    scored: int


def shards(rows: list[Example], size: int) -> list[list[Example]]:
    """Rows of like length together, `size` to a shard."""
    ordered = sorted(rows, key=lambda row: (len(row[0]), row))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def places(batch: Batch) -> list[Place]:
    """Of each row of the batch in which anything is scored; a row's padding and its neighbours are no part of its key."""
    found = []
    for ids, real, scored in zip(batch.ids.cpu(), batch.real.cpu(), batch.scored.cpu(), strict=True):
        if count := int(scored.sum()):
            said = ids[real].numpy().tobytes() + scored[real].numpy().tobytes()
            found.append(Place(hashlib.blake2b(said, digest_size=16).digest(), count))
    return found


def fingerprint(what: Any) -> str:
    """sha256 of anything that json can write."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()
