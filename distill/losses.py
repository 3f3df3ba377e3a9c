"""Losses as plain functions of two sets of logits, each 0 exactly where the two laws are equal; fp32 inside, in log space."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def forward_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(p || q) = sum p log(p / q) in nats: [N, V], [N, V] -> [N]. Its gradient in the draft's logits is q - p."""
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return _expect(log_p, log_p - log_q)


def reverse_kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(q || p) = sum q log(q / p) in nats: [N, V], [N, V] -> [N]."""
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return _expect(log_q, log_q - log_p)


def total_variation(draft: Tensor, target: Tensor) -> Tensor:
    """0.5 * sum |p - q| = 1 - acceptance: [N, V], [N, V] -> [N]. Its gradient vanishes far from the target: warm-start first."""
    return 0.5 * (target.float().softmax(-1) - draft.float().softmax(-1)).abs().sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}


def acceptance(draft: Tensor, target: Tensor) -> Tensor:
    """sum min(p, q), the chance that a token drafted from q is kept (Leviathan et al. 2211.17192): [N, V], [N, V] -> [N]."""
    return torch.minimum(target.float().softmax(-1), draft.float().softmax(-1)).sum(-1)


def _expect(log_law: Tensor, values: Tensor) -> Tensor:
    """sum law * values, where an id of no mass adds nothing though its value is infinite or not a number."""
    law = log_law.exp()
    return torch.where(law > 0, law * values.masked_fill(law == 0, 0.0), 0.0).sum(-1)
