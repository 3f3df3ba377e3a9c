"""Which of the target's ids a draft should be able to say: a head of the frequent ones costs a fraction, and what it cannot say the target says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.distill.batch import Row, example
from draftsmith.specdec.models import eos_ids, output_rows


class Trim(NamedTuple):
    """`ids` [V'], ascending; the share of all answer tokens that they cover, in the rows counted and in those held out (nan
    without any); `table` [V]: the place of each of the target's ids among them, -1 where a draft cannot say it."""

    ids: Tensor
    coverage: float
    held_out: float
    table: Tensor

    def __str__(self) -> str:
        held = "" if self.held_out != self.held_out else f", {self.held_out:.2%} of those held out"
        return f"{len(self.ids)} of {len(self.table)} ids: {self.coverage:.2%} of the answer tokens{held}"


def frequent(rows: Iterable[Row], size: int, vocabulary: int, always: Collection[int] = (), held_out: Iterable[Row] = ()) -> Trim:
    """The `size` ids of 0..vocabulary-1 that the answers hold most often (FR-Spec 2502.14856), `always` among them.

    Of equals the lower id is taken, so that where the answers hold fewer than `size`, the lowest ids fill up: in a BPE
    vocabulary these are the bytes and the earliest, commonest merges.
    """
    said = _said(rows)
    _check(size, vocabulary, always)
    order = _order(said, vocabulary, frozenset(always))
    ids = torch.tensor(sorted(order[:size]), dtype=torch.long)
    table = torch.full((vocabulary,), -1, dtype=torch.long)
    table[ids] = torch.arange(len(ids))
    kept = set(order[:size])
    return Trim(ids, _share(said, kept), _share(_said(held_out), kept), table)


def always_said(target: Any, tokenizer: Any) -> list[int]:
    """The ids that a draft must be able to say however rare they are: what ends a text or a turn, and the special tokens."""
    rows = output_rows(target)
    return sorted({*eos_ids(target, tokenizer), *(one for one in tokenizer.all_special_ids if one < rows)})


def _said(rows: Iterable[Row]) -> Counter[int]:
    """How often each id is an answer's: prompts are not for the draft to say."""
    said: Counter[int] = Counter()
    for row in rows:
        said.update(example(row).answers)
    return said


def _order(said: Counter[int], vocabulary: int, always: frozenset[int]) -> list[int]:
    """All ids in the order in which they are kept."""
    strange = [one for one in (*said, *always) if not 0 <= one < vocabulary]
    if strange:
        raise ValueError(f"the rows or `always` hold id {strange[0]}; the target's ids are 0..{vocabulary - 1}")
    return sorted(range(vocabulary), key=lambda one: (one not in always, -said[one], one))


def _check(size: int, vocabulary: int, always: Collection[int]) -> None:
    least = max(1, len(set(always)))
    if not least <= size <= vocabulary:
        raise ValueError(
            f"a draft vocabulary of {size} ids asked; the target has {vocabulary}, and {len(set(always))} of them are kept whatever happens "
            f"(EOS and special tokens): ask for {least}..{vocabulary}"
        )


def _share(said: Counter[int], kept: set[int]) -> float:
    """nan where nothing was said."""
    return sum(count for one, count in said.items() if one in kept) / said.total() if said else float("nan")
