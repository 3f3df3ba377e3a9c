"""The acceptance rules: which drafted tokens stay, and what the target says next. Both leave the target's law untouched."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.specdec.sampling import Generator, draw, flip, uniform


class Verdict(NamedTuple):
    """How many drafted tokens each row keeps, [B], and the target's own next token after them, [B]."""

    accepted: Tensor
    next: Tensor


def verify(p: Tensor, q: Tensor | None, draft: Tensor, n_draft: Tensor, generator: Generator = None) -> Verdict:
    """Token-level verification (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

    `p` [B, K+1, V] are the target's laws, `q` [B, K, V] the laws that `draft` [B, K] was drawn from (None: each drafted
    token was certain, so its law is one-hot), `n_draft` [B] how many of the K count in each row.

    Draft i stays with chance min(1, p_i / q_i); at the first refusal the next token comes from max(p - q, 0), and after
    a full block from p at the position behind it.
    """
    _check(p, q, draft, n_draft)
    p_drafted, q_drafted = _at(p[:, :-1], draft), None if q is None else _at(q, draft)
    # chance > 1 means certainty. 0 / 0 becomes 0: what the target forbids is never kept.
    chance = p_drafted if q_drafted is None else p_drafted / q_drafted.clamp_min(torch.finfo(p.dtype).tiny)
    noise = _noise(draft, generator)
    stays = flip(chance, noise[:, 1:])
    stays &= torch.arange(draft.shape[1], device=draft.device) < n_draft[:, None]
    accepted = stays.long().cumprod(-1).sum(-1)
    left = _residual(p, q, draft, n_draft, accepted, torch.ones_like(accepted, dtype=p.dtype))
    return Verdict(accepted, draw(left, noise=noise[:, 0]))


def verify_block(p: Tensor, q: Tensor | None, draft: Tensor, n_draft: Tensor, generator: Generator = None) -> Verdict:
    """Block verification (Sun et al. 2403.10444): never fewer tokens than `verify` in expectation, the same law.

    Arguments as for `verify`; q must be causal: q_i given the drafted tokens before i. A one-hot q gains nothing from
    the block rule but is served by it.
    """
    _check(p, q, draft, n_draft)
    batch, k = draft.shape
    if q is None:
        q = torch.zeros_like(p[:, :-1]).scatter_(-1, draft[..., None], 1.0)
    ratio = _at(p[:, :-1], draft) / _at(q, draft).clamp_min(torch.finfo(p.dtype).tiny)
    weight = torch.ones(batch, dtype=p.dtype, device=p.device)
    weights, chances = [weight], []
    for i in range(k):
        weight = (weight * ratio[:, i]).clamp_max(1.0)
        weights.append(weight)
        if i + 1 < k:
            spare = (weight[:, None] * p[:, i + 1] - q[:, i + 1]).clamp_min(0).sum(-1)
            rest = spare + 1 - weight
            inside = torch.where(rest > 0, spare / rest.clamp_min(torch.finfo(p.dtype).tiny), torch.ones_like(rest))
        else:
            inside = weight
        # Behind a draft that the target forbids (weight 0) nothing stays, whatever p is there: it may not be a law at all.
        inside = torch.where(weight > 0, inside, torch.zeros_like(inside))
        chances.append(torch.where(n_draft == i + 1, weight, inside))  # the last draft of a row is kept with its weight
    accepted = torch.zeros(batch, dtype=torch.long, device=p.device)
    noise = _noise(draft, generator)
    if k:
        kept = flip(torch.stack(chances, -1), noise[:, 1:])
        place = torch.arange(1, k + 1, device=p.device)
        accepted = (kept & (place <= n_draft[:, None])).long().mul(place).amax(-1)
    scale = torch.stack(weights, -1).gather(-1, accepted[:, None]).squeeze(-1)
    return Verdict(accepted, draw(_residual(p, q, draft, n_draft, accepted, scale), noise=noise[:, 0]))


def verify_greedy(logits: Tensor, draft: Tensor, n_draft: Tensor) -> Verdict:
    """What both rules decide at temperature 0, from `logits` [B, K+1, V] and without a law of V numbers a position.

    There p is one-hot: a draft stays where it is the target's choice, whatever q was, and the next token is the target's choice.
    """
    best, says = (each.tolist() for each in logits.max(-1))  # [B, K+1]; a walk of a few numbers is cheaper than ten kernels
    accepted, following = [], []
    for top, says_here, drafted, n in zip(best, says, draft.tolist(), n_draft.tolist(), strict=True):
        kept = next((i for i in range(n) if says_here[i] != drafted[i]), n)
        if not all(one > -math.inf for one in top[: kept + 1]):  # False for NaN too
            raise ValueError(
                "the target leaves no token a chance: NaN weights, an overflow in fp16, or processors that forbid every token"
            )
        accepted.append(kept)
        following.append(says_here[kept])
    return Verdict(torch.tensor(accepted, device=draft.device), torch.tensor(following, device=draft.device))


VERIFY = {"token": verify, "block": verify_block}


def _residual(p: Tensor, q: Tensor | None, draft: Tensor, n_draft: Tensor, accepted: Tensor, scale: Tensor) -> Tensor:
    """The weights of the next token: [B, V]. p itself behind a full block, max(scale * p - q, 0) at a refusal."""
    rows = torch.arange(len(draft), device=draft.device)
    here = p[rows, accepted]
    if not draft.shape[1]:
        return here
    where = accepted.clamp_max(draft.shape[1] - 1)
    if q is None:
        left = here.scatter(-1, draft[rows, where][:, None], 0.0)
    else:
        left = (scale[:, None] * here - q[rows, where]).clamp_min(0)
    # Rounding can leave nothing of p - q where the two laws are equal; the refusal itself then had chance ~0.
    refused = (accepted < n_draft) & (left.sum(-1) > 0)
    return torch.where(refused[:, None], left, here)


def _noise(draft: Tensor, generator: Generator) -> Tensor:
    """[B, 1+K]: the next token's first, so that it does not depend on K, which a neighbour in the batch may have set."""
    return uniform(draft.shape[0], draft.shape[1] + 1, generator, draft.device)


def _at(laws: Tensor, tokens: Tensor) -> Tensor:
    return laws.gather(-1, tokens[..., None]).squeeze(-1)


def _check(p: Tensor, q: Tensor | None, draft: Tensor, n_draft: Tensor) -> None:
    batch, k = draft.shape
    asked = f"draft [{batch}, {k}]"
    if p.shape[:2] != (batch, k + 1):
        raise ValueError(f"{asked} needs p [{batch}, {k + 1}, V], found {list(p.shape)}")
    if q is not None and q.shape != (batch, k, p.shape[-1]):
        raise ValueError(f"{asked} needs q [{batch}, {k}, {p.shape[-1]}] like p's vocabulary, found {list(q.shape)}")
    if n_draft.shape != (batch,) or bool((n_draft > k).any()) or bool((n_draft < 0).any()):
        raise ValueError(f"{asked} needs n_draft [{batch}] in 0..{k}, found {n_draft.tolist()}")
