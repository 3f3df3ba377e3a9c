"""Rows to tensors, and the one shift by one: `scored[b, t]` says whether the prediction made AT t, of token t+1, counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[int, int]
Row = tuple[list[int], int | Sequence[Span]]  # ids, and how many of them are prompt, or the spans that are answers


class Example(NamedTuple):
    """A row: its ids, and the spans [start, end) of them that are answers, in order. Each token of a span is to be predicted."""

    ids: list[int]
    spans: tuple[Span, ...]

    @property
    def scored(self) -> int:
        """How many tokens are to be predicted."""
        return sum(end - start for start, end in self.spans)

    @property
    def answers(self) -> list[int]:
        """The ids that are to be predicted."""
        return [one for start, end in self.spans for one in self.ids[start:end]]


def example(row: Row, what: str = "this row") -> Example:
    """A row in its general form; a prompt of n tokens means one span, from n to the end."""
    ids, told = row
    if isinstance(told, int):
        if not 1 <= told <= len(ids):
            raise ValueError(f"{what}: a prompt of {told} in a row of {len(ids)} tokens; it needs 1..{len(ids)}")
        return Example(ids, ((told, len(ids)),) if told < len(ids) else ())
    spans = tuple((start, end) for start, end in told)
    edges = [1, *chain.from_iterable(spans), len(ids)]
    if edges != sorted(edges) or any(start == end for start, end in spans):
        raise ValueError(
            f"{what}: the spans {list(spans)} in a row of {len(ids)} tokens; they need 1 <= start < end <= {len(ids)}, in order and "
            "apart (nothing predicts the first token of a row)"
        )
    return Example(ids, spans)


class Batch(NamedTuple):
    """`ids`, `real` (not padding) and `scored`, each [B, T]; `scored` is aligned with logits, not with labels.

    `documents` [B, T] counts the rows that share a sequence, from 0 (padding is -1), and is None where none does. A model
    that is given a batch must be given it too (`distill.packing`), or one row would read another.
    """

    ids: Tensor
    real: Tensor
    scored: Tensor
    documents: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        return Batch(*(None if one is None else one.to(device) for one in self))  # type: ignore[arg-type]

    def rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, scored) of each row without padding, those of one sequence one by one: the order of `ids[scored]`."""
        for b, real in enumerate(self.real):
            documents = real.long() - 1 if self.documents is None else self.documents[b]
            for number in range(int(documents.max()) + 1):
                at = documents == number
                yield self.ids[b][at], self.scored[b][at]


def collate(rows: Sequence[Row | list[Example]], pad: int = 0) -> Batch:
    """Pad rows of (ids, prompt length), or (ids, spans), on the right; a list in place of a row is several rows in one sequence.

    Every token of a span is to be predicted, EOS included. Masks come from lengths, never from ids, so a pad id that equals
    EOS hides nothing. Padding on the right of a causal model is never attended to by a real token.
    """
    packs = [
        [example(one, f"row {number}") for one in (row if isinstance(row, list) else [row])] for number, row in enumerate(rows)
    ]
    widest = max((sum(len(one.ids) for one in pack) for pack in packs), default=0)
    padded = torch.full((len(packs), widest), pad, dtype=torch.long)
    scored = torch.zeros(len(packs), widest, dtype=torch.bool)
    documents = torch.full((len(packs), widest), -1, dtype=torch.long)
    for b, pack in enumerate(packs):
        at = 0
        for number, (ids, spans) in enumerate(pack):
            padded[b, at : at + len(ids)] = torch.tensor(ids)
            documents[b, at : at + len(ids)] = number
            for start, end in spans:
                scored[b, at + start - 1 : at + end - 1] = True
            at += len(ids)
    return Batch(padded, documents >= 0, scored, documents if any(len(pack) > 1 for pack in packs) else None)


def in_batches(rows: Sequence[Row], device: torch.device, size: int = 8) -> Iterator[Batch]:
    """Rows in their order, `size` of them at a time."""
    for at in range(0, len(rows), size):
        yield collate(rows[at : at + size]).to(device)
