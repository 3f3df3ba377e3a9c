"""A target's law kept as its k likeliest ids: all that they leave is one outcome more, so a draft that equals the target is at rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.distill.losses import NEVER
from draftsmith.distill.signal import Overlap


class Listened(NamedTuple):
    """What a target says at n positions: its K likeliest ids, the likeliest first, and the natural logs of their chances.

    The chance of all other ids together is 1 - sum exp(log_p). `log_p + log_sum_exp` are the raw logits; where only the law
    is known (a served target), `log_sum_exp` is not a number. The last two are there where they were asked for: logs of
    sum p^(1/T), over the ids that are not among the K, and over those of a support that are not among them.
    """

    ids: Tensor  # [n, K]
    log_p: Tensor  # [n, K], at temperature 1
    log_sum_exp: Tensor  # [n]
    tempered: Tensor | None = None  # [n]
    supported: Tensor | None = None  # [n]

    def rest(self) -> Tensor:
        """The log of the chance of all other ids, at least about NEVER: [n]."""
        left = -torch.expm1(self.log_p.float().logsumexp(-1))
        return (left.clamp(min=0) + math.exp(NEVER)).log()

    def picked(self, which: slice | Tensor) -> Listened:
        return Listened(*(None if one is None else one[which] for one in self))  # type: ignore[arg-type]


@torch.no_grad()
def top_k(logits: Tensor, k: int, temperature: float = 1.0, support: Tensor | None = None) -> Listened:
    """Logits [n, V] -> their k likeliest ids. Ids of one chance come in the order of their numbers, as argmax takes the first.

    What else is asked for is summed here, where the whole law is at hand: the rest at another `temperature`, and the rest of
    a `support` (ids) at that temperature. Neither can be had from the k afterwards.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"the {k} likeliest of {logits.shape[-1]} ids asked; k must be 1..{logits.shape[-1]}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} asked of a stored law; it must be above 0")
    logits = logits.float()
    total = logits.logsumexp(-1)
    if wrong := int((~total.isfinite()).sum()):
        raise ValueError(f"the target's logits are not finite at {wrong} of {len(logits)} positions; load it in a wider dtype")
    law, first = logits.log_softmax(-1), logits.argmax(-1, keepdim=True)
    ids = logits.topk(k, dim=-1).indices
    # More than k equals: topk may leave out the one that argmax takes.
    ids = torch.where((ids == first).any(-1, keepdim=True), ids, torch.cat([first, ids[:, 1:]], -1)).sort(-1).values
    best = law.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, best.indices)
    others = law.scatter(-1, ids, -torch.inf).div_(temperature) if temperature != 1 or support is not None else None
    return Listened(
        ids,
        best.values,
        total,
        None if others is None or temperature == 1 else others.logsumexp(-1).clamp(min=NEVER),
        None if others is None or support is None else others[:, support].logsumexp(-1).clamp(min=NEVER),
    )


@dataclass(frozen=True)
class TopK:
    """A signal of N positions of which K ids and the rest are known: the outcomes are those K and all others as one.

    Exact at temperature 1 and at the one `temperature` that the target was asked at too; any other is refused, for the rest
    at another temperature hangs on how it is spread. `support` are the ids that `said.supported` is of. What is narrowed to
    them is for the losses, so it is known at `temperature` only.
    """

    said: Listened
    temperature: float = 1.0
    support: Tensor | None = None
    narrowed: bool = False

    def __len__(self) -> int:
        return len(self.said.ids)

    def against(self, logits: Tensor, at: slice, ids: Tensor | None = None, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Logs over K + 1 outcomes, twice [n, K + 1]. Of the K, those that a draft of few `ids` cannot say get NEVER."""
        if self.narrowed:
            if ids is not None:
                raise ValueError("a law that is narrowed to a support is for a draft over that support; it takes no other ids")
            ids = self.support
        said = self.said.picked(at)
        return _outcomes(logits.float() / temperature, said.ids, ids), self._law(said, temperature)

    def overlap(self, logits: Tensor, at: slice, ids: Tensor | None = None) -> Overlap:
        """sum over the K of min(p, q) <= acceptance <= that and the smaller of the two rests: how the rests overlap is not known."""
        if self.narrowed:
            raise ValueError("acceptance is of the whole law; ask the signal that was narrowed for it")
        ours, theirs = self.against(logits, at, ids)
        kept = torch.minimum(ours.softmax(-1), theirs.softmax(-1))
        low, best = kept[:, :-1].sum(-1), logits.argmax(-1)
        return Overlap(low, low + kept[:, -1], (best if ids is None else ids[best]) == self.said.ids[at][:, 0])

    def picked(self, which: Tensor) -> TopK:
        return replace(self, said=self.said.picked(which))

    def within(self, ids: Tensor, head: object = None) -> TopK:
        """The law given that the token is one of `ids`, exact: those of the K that are among them, and the rest of them as one.

        It needs the weight of that rest, which only the target could tell: another support than the one that it was asked
        for is refused.
        """
        if self.narrowed:
            raise ValueError("a law that is narrowed already cannot be narrowed again")
        if self.support is None or self.said.supported is None or not torch.equal(ids, self.support.to(ids.device)):
            raise ValueError(
                f"a support of {len(ids)} ids asked of a stored law that does not know their chance "
                f"({'no support' if self.support is None else 'another support'} was named when it was made): "
                "make the store with this support, or set train.support=all"
            )
        ids = ids.to(self.said.ids.device)
        outside, rest = _places(self.said.ids, ids) == len(ids), self.said.supported.float()
        law = self.said.log_p.float() / self.temperature
        whole = torch.cat([law.masked_fill(outside, -torch.inf), rest[:, None]], -1).logsumexp(-1)
        law = (law - whole[:, None]).masked_fill(outside, NEVER)
        said = self.said._replace(log_p=law * self.temperature, tempered=rest - whole, supported=None)
        return TopK(said, self.temperature, ids, narrowed=True)

    def _law(self, said: Listened, temperature: float) -> Tensor:
        if temperature == self.temperature and said.tempered is not None:
            rest = said.tempered.float()
        elif temperature == 1 and not self.narrowed:
            rest = said.rest()
        else:
            known = [f"{self.temperature:g}"] if said.tempered is not None else []
            known = known if self.narrowed else ["1", *known]
            raise ValueError(
                f"both laws at temperature {temperature:g} asked; {'a narrowed' if self.narrowed else 'this stored'} law is known at "
                f"{' and '.join(known)}. What its rest weighs at another cannot be had from the ids that were kept: "
                "make the store at that temperature"
            )
        return torch.cat([said.log_p.float() / temperature, rest[:, None]], -1)


def _outcomes(logits: Tensor, top: Tensor, ids: Tensor | None) -> Tensor:
    """A draft's law in logs over the `top` [n, K] of each position and all others as one: [n, K + 1].

    The rest is summed from what it is made of, never as 1 - sum: it may be 1e-12, or nothing at all. Each of the K leaves a
    K-th of NEVER behind, so the log of nothing is finite, and the same as the target's.
    """
    log_q = logits.float().log_softmax(-1)
    if ids is not None:
        log_q = nn.functional.pad(log_q, (0, 1), value=NEVER)  # where all that the draft cannot say is found
    places = top if ids is None else _places(top, ids)
    rest = log_q.scatter(-1, places, NEVER - math.log(top.shape[-1])).logsumexp(-1, keepdim=True)
    return torch.cat([log_q.gather(-1, places), rest], -1)


def _places(top: Tensor, ids: Tensor) -> Tensor:
    """Where each of `top` [n, K] stands among the sorted `ids`; len(ids) for those that are not there."""
    place = torch.searchsorted(ids, top)
    return place.masked_fill(ids[place.clamp(max=len(ids) - 1)] != top, len(ids))
