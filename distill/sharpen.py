"""The best map under the target's laws themselves: forward KL is convex in a linear map before a fixed head, so a few quasi-Newton steps
find it, from two numbers a feature and token: what the draft says and which row of the head the target expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.distill.head import Head

DAMPING = 1e-2  # of the mean diagonal, in the metric of the head; it only shapes the steps, not where they lead
HISTORY = 8  # pairs that the quasi-Newton memory keeps


class Rows(NamedTuple):
    """The rows of a head that its law is taken over: `weight` [S, H], `bias` [S] or None, both in float32."""

    weight: Tensor
    bias: Tensor | None

    def law(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [n, H] -> probabilities [n, S], and their log-sum-exp [n]."""
        logits = nn.functional.linear(hidden, self.weight, self.bias)
        total = logits.logsumexp(-1)
        return logits.sub_(total[:, None]).exp_(), total


def rows_of(head: Head, ids: Tensor | None = None) -> Rows:
    """ValueError for a head whose logits are not linear in the hidden state: KL is not convex in the map then."""
    if head.cap is not None:
        raise ValueError(f"this head caps its logits softly at {head.cap}; only a plain head can be sharpened")
    pick = slice(None) if ids is None else ids.to(head.linear.weight.device)
    bias = head.linear.bias
    return Rows(head.linear.weight.detach()[pick].float(), None if bias is None else bias.detach()[pick].float())


@torch.no_grad()
def expected(hidden: Tensor, rows: Rows, chunk: int) -> tuple[Tensor, Tensor]:
    """E_p[w], the row of the head that the target expects at each position [N, H], and the sum of its laws [S]."""
    means, mass = [], torch.zeros(len(rows.weight), device=hidden.device)
    for part in hidden.float().split(chunk):
        law, _ = rows.law(part)
        means.append(law @ rows.weight)
        mass += law.sum(0)
    return torch.cat(means), mass


@torch.no_grad()
def sharpened(x: Tensor, wanted: Tensor, mass: Tensor, rows: Rows, start: Tensor, steps: int, chunk: int) -> Iterator[Tensor]:
    """Maps [H, F] after each of `steps` steps of L-BFGS on the mean forward KL over N tokens, from the map `start`.

    With features x [N, F] and `wanted` = E_p[w] [N, H], KL(p || q) = lse(W A x) - <wanted, A x> + const, and its slope in A is
    the mean of (E_q[w] - wanted) x'. The steps are taken in coordinates in which the Kronecker-factored Fisher metric at the
    target's own laws, cov_p(w) by mean(x x') (Martens & Grosse 1503.05671), is the identity.
    """
    tokens = len(x)
    left = _root((rows.weight.T * mass).double() @ rows.weight.double() - wanted.double().T @ wanted.double() / tokens, DAMPING)
    right = _root(x.double().T @ x.double() / tokens, 1e-4)
    out, in_ = torch.linalg.inv(left).float(), torch.linalg.inv(right).float()
    # A = left^-T P right^-1
    point = nn.Parameter((left.T @ start.double() @ right).float())
    optimizer = torch.optim.LBFGS([point], max_iter=1, max_eval=5, history_size=HISTORY, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        here = out.T @ point.data @ in_
        total, slope = torch.zeros((), device=x.device), torch.zeros_like(here)
        for part, row in zip(x.split(chunk), wanted.split(chunk), strict=True):
            hidden = part @ here.T
            law, sums = rows.law(hidden)
            total += (sums - (hidden * row).sum(-1)).sum()
            slope += (law @ rows.weight - row).T @ part
        point.grad = out @ slope @ in_.T / tokens
        return total / tokens

    for _ in range(steps):
        optimizer.step(loss)  # type: ignore[no-untyped-call]
        yield out.T @ point.data @ in_


def _root(square: Tensor, damping: float) -> Tensor:
    """The Cholesky factor of a metric and a little of the identity."""
    size = len(square)
    return torch.linalg.cholesky(square + damping * square.diagonal().mean() * torch.eye(size, dtype=square.dtype, device=square.device))
