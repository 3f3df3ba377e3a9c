"""Losses as plain functions of two sets of logits, [N, V] and [N, V] -> [N], in float32 or wider, in log space, each position by itself.

`draft` and `target` may be logits, log-laws, or log-laws over buckets of ids: a loss is right on any set of outcomes. Logits of -inf are
allowed on either side; losses and slopes stay finite. docs/objectives.md has the formulas, the slopes, the sources, and advice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.specdec.models import pick

NEVER = -30.0  # nats that an id which a law forbids counts as inside a logarithm: a constant, for no slope could change it
LOWEST = -1e4  # below every log-probability that a float32 softmax gives, T = 0.05 included
SPREAD = 0.01  # the smallest standard deviation that tvd_pp divides by, so it never multiplies a slope by more than 100


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q) in nats. Its slope in the draft's logits is q - p."""
    return _kl(_log_law(target), _log_law(draft))


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p) in nats. Its slope is q (log(q / p) - KL(q || p))."""
    return _kl(_log_law(draft), _log_law(target))


def jsd(draft: Tensor, target: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (GKD, Agarwal et al. 2306.13649); 0.5 is symmetric."""
    log_p, log_q = _possible(_log_law(target)), _possible(_log_law(draft))
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return (beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m)).sum(-1)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """0.5 sum |p - q| = 1 - acceptance. Its slope vanishes far from the target: warm-start first."""
    return 0.5 * (_law(target) - _law(draft)).abs().sum(-1)


def tvd_pp(draft: Tensor, target: Tensor) -> Tensor:
    """Total variation over the standard deviation, under q, of the reward 1{p > q}, which is held fixed (Goel et al. 2403.00858).

    The paper weighs -grad log q by (r - mean r) / std r over tokens drawn for a batch. Here the expectation is exact: the
    mean then drops out (E_q grad log q = 0) and what is left is the slope of total variation over std r. It is taken at each position,
    so that a loss never hangs on its neighbours or on how positions are cut into chunks. The value is a scaled one: compare it with nothing.
    """
    p, q = _law(target), _law(draft)
    mean = (q * (p > q)).sum(-1).detach()
    return 0.5 * (p - q).abs().sum(-1) / (mean * (1 - mean)).clamp(min=0).sqrt().clamp(min=SPREAD)


def lk_alpha(draft: Tensor, target: Tensor) -> Tensor:
    """-log sum min(p, q) = -log acceptance (LK losses, 2602.23881); its slope is that of total variation over the acceptance.

    Others clamp the acceptance at 1e-5, where the slope is then 0. In log space no clamp is needed: the slope's absolute sum is at most 2.
    """
    shared = torch.minimum(_log_law(draft), _log_law(target))
    return -shared.masked_fill(shared == -torch.inf, LOWEST).logsumexp(-1)


def lk_lambda(draft: Tensor, target: Tensor, eta: float = 3.0) -> Tensor:
    """l KL(p || q) + (1 - l) TV with l = exp(-eta acceptance), held fixed: KL while little is accepted, overlap once much is (2602.23881).

    The paper takes the acceptance of a whole batch; here, as in speculators, it is each position's own, so that chunks do not matter.
    """
    log_p, log_q = _log_law(target), _log_law(draft)
    apart = 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    share = (-eta * (1 - apart)).exp().detach()
    return share * _kl(log_p, log_q) + (1 - share) * apart


def ce_argmax(draft: Tensor, target: Tensor, rest: int = 0) -> Tensor:
    """-log q(the target's likeliest token); the last `rest` outcomes stand for several tokens and are none."""
    best = target[..., : target.shape[-1] - rest].argmax(-1, keepdim=True)
    return -_possible(_log_law(draft).gather(-1, best)).squeeze(-1)


def ce_data(draft: Tensor, target: Tensor) -> Tensor:
    """-log q(the token that the data holds): `target` is here not the teacher's law but one that is sure of that token."""
    return ce_argmax(draft, target)


def hass(draft: Tensor, target: Tensor, k: int = 10, rest: int = 0) -> Tensor:
    """-sum p log q over the target's k likeliest tokens (HASS, Zhang et al. 2408.15766); `rest` as in ce_argmax."""
    log_p = _log_law(target)[..., : target.shape[-1] - rest]
    best, ids = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    return -(best.exp() * _possible(_log_law(draft).gather(-1, ids))).sum(-1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "total_variation": total_variation,
    "tvd_pp": tvd_pp,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
    "ce_argmax": ce_argmax,
    "ce_data": ce_data,
    "hass": hass,
}
OF_TOKENS = frozenset({"ce_argmax", "hass"})  # these pick tokens, and must be told how many of the last outcomes are none (`rest`)
OF_DATA = frozenset({"ce_data"})  # these learn from the data's own token; what they are given as `target` is sure of it
DIVERGENCES = frozenset(LOSSES) - OF_TOKENS - OF_DATA  # 0 where the two laws are equal, and only there


class Parameter(NamedTuple):
    """What may stand behind a loss's name and a colon: a number above one bound and below another."""

    name: str
    read: type[int] | type[float]
    above: float
    below: float


PARAMETERS: dict[str, Parameter] = {
    "jsd": Parameter("beta", float, 0, 1),
    "lk_lambda": Parameter("eta", float, 0, math.inf),
    "hass": Parameter("k", int, 0, math.inf),
}


def loss_named(name: str) -> Callable[..., Tensor]:
    """A loss by its name, with its parameter behind a colon where it takes one: `forward_kl`, `jsd:0.1`, `lk_lambda:10`, `hass:5`."""
    kind, colon, value = name.partition(":")
    loss = pick(LOSSES, kind, "loss")
    if not colon:
        return loss
    if kind not in PARAMETERS:
        takers = ", ".join(f"{one}:{what.name.upper()}" for one, what in PARAMETERS.items())
        raise ValueError(f"loss {name!r}: {kind} takes no parameter; those that do are {takers}")
    what, read, above, below = PARAMETERS[kind]
    try:
        number = read(value)
    except ValueError:
        number = math.nan
    if not above < number < below:
        wanted = f"a {'whole ' if read is int else ''}number above {above}" + (f" and below {below}" if below < math.inf else "")
        raise ValueError(f"loss {name!r}: {what} must be {wanted}, found {value!r}")
    return functools.partial(loss, **{what: number})


def acceptance(draft: Tensor, target: Tensor) -> Tensor:
    """sum min(p, q), the chance that a token drafted from q is kept (Leviathan et al. 2211.17192): [N, V], [N, V] -> [N]."""
    return torch.minimum(_law(target), _law(draft)).sum(-1)


def _law(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _log_law(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _possible(log_law: Tensor) -> Tensor:
    return log_law.masked_fill(log_law == -torch.inf, NEVER)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum p log(p / q), where what p forbids adds nothing, and what q forbids counts as NEVER."""
    return (log_p.exp() * (_possible(log_p) - _possible(log_q))).sum(-1)
