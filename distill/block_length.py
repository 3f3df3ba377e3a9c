"""How many tokens a call of the target is expected to yield, from acceptance along the target's own text.

It is the mean of per-block products. The product of mean acceptances is another number, and too low: hard positions come together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from draftsmith.distill.signal import Overlap


def block_tokens(alphas: Tensor, k: int) -> Tensor:
    """Expected tokens of the call whose block of `k` drafts starts at each position of one run: alphas [n] -> [n], float64.

    A block at t yields 1 + sum_i prod_{j < i} alphas[t + j], for i = 1 .. min(k, n - 1 - t): near the end of the run it is
    shorter, for a call yields no more tokens than the text has left, and the last of them is the target's own.
    """
    n, alphas = len(alphas), alphas.double()
    expected, product = torch.ones_like(alphas), torch.ones_like(alphas)
    for i in range(min(k, n - 1)):
        product = product[: n - 1 - i] * alphas[i : n - 1]
        expected[: n - 1 - i] += product
    return expected


def block_length(runs: Iterable[Tensor], k: int) -> float:
    """Expected tokens a call over all blocks of `k` drafts, one from every position of every run of acceptances [n]."""
    expected = [block_tokens(alphas, k) for alphas in runs]
    if not sum(map(len, expected)):
        raise ValueError("a block length was asked of no position at all: no row has a scored token")
    return float(torch.cat(expected).mean())


def runs(scored: Tensor) -> list[int]:
    """Lengths of the unbroken runs of scored positions, [B, T] bool read row by row.

    A block ends where its run does: it reaches over no row's end, no user's turn and no packed neighbour.
    """
    edges = torch.nn.functional.pad(scored.cpu().int(), (1, 1)).diff(dim=-1)  # 1 where a run starts, -1 behind its end
    return ((edges == -1).nonzero()[:, 1] - (edges == 1).nonzero()[:, 1]).tolist()


def block_sums(scored: Tensor, each: Overlap, k: int) -> dict[str, float]:
    """Sums of the expected tokens over all scored positions of a batch, `each` in their order.

    `block_length` rests on sum min(p, q), for text drawn at temperature 1 (where only bounds are known, it is the lower one);
    `greedy_block_length` rests on whether both laws have the same most likely id, and on the target's own greedy text is what a
    decoder at temperature 0 gets.
    """
    values = {"block_length": each.low, "block_length_at_most": each.high, "greedy_block_length": each.agrees}
    parts = runs(scored)
    return {
        name: float(sum(block_tokens(run, k).sum() for run in alphas.detach().double().cpu().split(parts)))
        for name, alphas in values.items()
    }
