"""What the target says at the scored positions of a batch, set against a draft's logits a few positions at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftsmith.distill.head import Head, Logits
from draftsmith.distill.losses import NEVER, acceptance


class Overlap(NamedTuple):
    """Bounds on the acceptance of each position [n] (equal where the target's whole law is known), and whether both name one id."""

    low: Tensor
    high: Tensor
    agrees: Tensor


class Signal(Protocol):
    """N scored positions. `at` picks n of them; `logits` [n, V'] are the draft's there, over all of the target's ids, or over
    the sorted `ids` [V'] that are all it can say."""

    def __len__(self) -> int: ...

    def against(self, logits: Tensor, at: slice, ids: Tensor | None = None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Draft and target over one set of outcomes, as two sets of logits [n, M] that any loss takes; both at `temperature`."""

    def overlap(self, logits: Tensor, at: slice, ids: Tensor | None = None) -> Overlap:
        """What a speculative decoder would accept at temperature 1, under the whole laws."""

    def picked(self, which: Tensor) -> Signal:
        """The positions `which` [n] only."""

    def within(self, ids: Tensor, head: Logits | None = None) -> Signal:
        """The law given that the token is one of `ids`: what a draft whose logits are over these alone is taught cheaply.

        `head` is the target's over these ids, where somebody keeps it: a signal lives for one batch, and would gather its rows anew."""


@dataclass(frozen=True)
class Dense:
    """The target's final hidden states [N, H], and the head that makes logits of them."""

    hidden: Tensor
    head: Logits

    def __len__(self) -> int:
        return len(self.hidden)

    def against(self, logits: Tensor, at: slice, ids: Tensor | None = None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        wanted = self._wanted(at)
        if temperature != 1:
            logits, wanted = logits / temperature, wanted / temperature
        return _over_one_set(logits, wanted, ids)

    def overlap(self, logits: Tensor, at: slice, ids: Tensor | None = None) -> Overlap:
        wanted, said = self._wanted(at), logits.argmax(-1)
        kept = acceptance(*_over_one_set(logits, wanted, ids))
        # The ids that a draft cannot say are one outcome, which may be likelier than any single id: the target's choice is asked of its own law.
        return Overlap(kept, kept, (said if ids is None else ids[said]) == wanted.argmax(-1))

    def picked(self, which: Tensor) -> Dense:
        return Dense(self.hidden[which], self.head)

    def within(self, ids: Tensor, head: Logits | None = None) -> Dense:
        if not isinstance(self.head, Head):
            raise ValueError("a law that is narrowed already cannot be narrowed again")
        return Dense(self.hidden, head or self.head.over(ids))

    def _wanted(self, at: slice) -> Tensor:
        with torch.no_grad():
            return self.head(self.hidden[at])


def _over_one_set(draft: Tensor, target: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    if ids is None:
        return draft, target
    return with_never(draft), inside_and_rest(target.float().log_softmax(-1), ids)


def with_never(logits: Tensor) -> Tensor:
    """A draft's law [n, V'] and one more outcome that it cannot say: [n, V' + 1], in logs."""
    return torch.nn.functional.pad(logits.float().log_softmax(-1), (0, 1), value=NEVER)


def inside_and_rest(log_law: Tensor, ids: Tensor) -> Tensor:
    """A law [n, V] in logs over `ids` [V'] and, as one outcome, all others, never less than `NEVER`: [n, V' + 1]."""
    rest = log_law.index_fill(-1, ids, -torch.inf).logsumexp(-1, keepdim=True).clamp_min(NEVER)
    return torch.cat([log_law[..., ids], rest], dim=-1)
