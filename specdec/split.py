"""A target cut in two where an early exit leaves it, so that verification goes on from the layers that drafting has run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.cache_layers import new_cache
from draftsmith.specdec.halves import halves
from draftsmith.specdec.models import output_rows

CLOSE = 1e-4  # of the largest logit; the halves are tried on blocks of the whole model's shapes, so only rounding may differ


class Read(NamedTuple):
    """What an exit has read and the target has not: ids, whether they exist [B, T], their states at the seam [B, T, H]."""

    ids: Tensor
    exists: Tensor
    states: Tensor


class SplitLM:
    """A `CachedLM` of a target whose first `layer` layers draft: no layer runs twice on a token, and no key is kept twice.

    `view` is the exit as a model: the target's first `layer` layers, whatever stands above them, a norm and a head. Each half
    is a `CachedLM` with columns of its own, for before the target's call a row that drafted has read more below than one that
    did not; behind it both halves hold the same tokens.
    """

    def __init__(self, target: PreTrainedModel, view: PreTrainedModel, layer: int, batch_size: int) -> None:
        lower, upper, self._seam = halves(target, view, layer)
        self.model, self.batch_size = target, batch_size
        self.lower = CachedLM(lower, batch_size)
        self.upper = CachedLM(upper, batch_size, new_cache(target.config, above=layer))
        self._ahead: list[Read] = []

    @property
    def lengths(self) -> Tensor:
        """Live tokens of each row that the target has seen: [B]."""
        return self.upper.lengths

    def draft(self, ids: Tensor, valid: Tensor | None, keep: int | None = None) -> Tensor:
        """The exit reads ahead: logits of its head. The next `extend` takes up what it begins with of these tokens, and drops the rest."""
        logits, _ = self.lower.extend(ids, valid, keep=keep)
        states = self._seam.taken()
        exists = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
        self._ahead.append(Read(ids.to(states.device), exists.to(states.device), states))
        return logits

    def extend(
        self, ids: Tensor, valid: Tensor | None, hidden_layers: Sequence[int] = (), keep: int | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `CachedLM.extend`, but that layers which have run on a token do not run again, and that it gives no hidden states."""
        if hidden_layers:
            raise ValueError(
                f"hidden states of the layers {list(hidden_layers)} asked of a target that shares its cache with an exit, which gives "
                "none; let the exit keep a cache of its own (shared=False)"
            )
        if self._ahead:
            states = self._joined(ids, valid)
        else:
            self.lower.extend(ids, valid, keep=0)
            states = self._seam.taken()
        with self._seam.giving(states):
            return self.upper.extend(ids, valid, keep=keep)

    def forget(self, n: Tensor | Sequence[int]) -> None:
        """As `CachedLM.forget`."""
        for half in (self.lower, self.upper):
            half.forget(n)

    def select(self, rows: Tensor) -> None:
        """As `CachedLM.select`."""
        self.batch_size = len(rows)
        for half in (self.lower, self.upper):
            half.select(rows)

    def cannot_roll_back(self) -> str | None:
        """As `CachedLM.cannot_roll_back`."""
        return self.lower.cannot_roll_back() or self.upper.cannot_roll_back()

    def _joined(self, ids: Tensor, valid: Tensor | None) -> Tensor:
        """The states of `ids` [B, T] at the seam, [B, T, H]: those that drafting left, and the others computed now."""
        ahead, self._ahead = self._ahead, []
        read, there, states = (torch.cat(side, dim=1) for side in zip(*ahead, strict=True))
        old = [_real(*row) for row in zip(read.tolist(), there.tolist(), strict=True)]
        exists = torch.ones_like(ids, dtype=torch.bool) if valid is None else valid
        new = [_real(*row) for row in zip(ids.tolist(), exists.tolist(), strict=True)]
        same = [_same(*pair) for pair in zip(old, new, strict=True)]
        width = read.shape[1]
        if self.lower.window is not None and any(kept < min(width, len(asked)) for kept, asked in zip(same, new, strict=True)):
            same = [0] * len(same)  # a row would get a hole, and a window counts the columns of holes too
        refused = [len(had) - kept for had, kept in zip(old, same, strict=True)]
        if any(refused):
            self.lower.forget(refused)
        rest = [[token for _, token in asked[kept:]] for asked, kept in zip(new, same, strict=True)]
        if widest := max(map(len, rest)):
            self.lower.extend(*_padded(rest, widest), keep=0)
            states = torch.cat([states, self._seam.taken()], dim=1)
        where = torch.zeros_like(ids, device="cpu")  # the column of each token's state; any will do for tokens that do not exist
        for b, (had, asked, kept) in enumerate(zip(old, new, same, strict=True)):
            for place, (column, _) in enumerate(asked):
                where[b, column] = had[place][0] if place < kept else width + place - kept
        if states.shape[1] == ids.shape[1] and bool((where == torch.arange(ids.shape[1])).all()):
            return states
        return states.gather(1, where.to(states.device)[:, :, None].expand(-1, -1, states.shape[-1]))


class ReadsAhead:
    """What a drafter sees of a `SplitLM`: the lower half, of which the decoder alone, once a round and for both halves, forgets
    and selects."""

    def __init__(self, lm: SplitLM) -> None:
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm.lower, name)

    def extend(self, ids: Tensor, valid: Tensor | None, keep: int | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._lm.draft(ids, valid, keep), ()

    def forget(self, n: Tensor | Sequence[int]) -> None: ...

    def select(self, rows: Tensor) -> None: ...


@torch.inference_mode()
def cannot_split(target: PreTrainedModel, view: PreTrainedModel, layer: int) -> str | None:
    """Why the two halves are not the whole, found out by trying a prefill and a block behind it; None where they are."""
    try:
        whole, parts = CachedLM(target, 1), SplitLM(target, view, layer, 1)
        some = torch.arange(min(7, whole.max_positions or 7), device=target.device) % output_rows(target)
        for ids in some[None].split(4, dim=1):
            wanted, found = whole.extend(ids, None)[0].float(), parts.extend(ids, None)[0].float()
            error, scale = (float(one.abs().max()) for one in (found - wanted, wanted))
            if not error <= max(CLOSE, 4 * torch.finfo(target.dtype).eps) * scale:
                return f"the halves of a {type(target).__name__} give other logits than the whole, by {error:.3g} of {scale:.3g}"
    except ValueError as error:
        return str(error)
    except Exception as error:  # a model that does not like to be cut may fail in any way, and the other path serves it
        return f"the halves of a {type(target).__name__} do not run: {type(error).__name__}: {error}".splitlines()[0]
    return None


def _real(tokens: list[int], exists: list[bool]) -> list[tuple[int, int]]:
    """(column, token) of the tokens that exist."""
    return [(column, token) for column, (token, real) in enumerate(zip(tokens, exists, strict=True)) if real]


def _same(old: list[tuple[int, int]], new: list[tuple[int, int]]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0][1] == pair[1][1], zip(old, new, strict=False)))


def _padded(texts: list[list[int]], width: int) -> tuple[Tensor, Tensor | None]:
    """(ids, valid), both [B, width]."""
    valid = torch.arange(width) < torch.tensor([len(text) for text in texts])[:, None]
    return torch.tensor([text + [0] * (width - len(text)) for text in texts]), None if bool(valid.all()) else valid
