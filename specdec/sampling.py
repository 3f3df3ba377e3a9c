"""Every law that the decoder draws from is made here, and every random choice is one of two functions: `draw` and `flip`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Generator = torch.Generator | Sequence[torch.Generator] | None  # one for the batch, or one a row


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k and top-p of the served text; 0 / 0 / 1 are off, and temperature 0 is greedy.

    The order is that of transformers and vLLM: temperature, then top-k, then top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, found {self.temperature}; 0 is greedy")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ValueError(f"top_k must be a whole number >= 0, found {self.top_k}; 0 turns it off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], found {self.top_p}; 1 turns it off")


def to_probs(logits: Tensor, how: Sampling) -> Tensor:
    """The law that `how` makes of raw logits: [..., V] -> [..., V] float32, rows summing to 1.

    At temperature 0 it is one-hot on the largest logit, the lowest id where several are equal, so greedy decoding is
    sampling from a one-hot law and needs no branch anywhere else.
    """
    logits = logits.float()
    if how.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # Subtracting the maximum before dividing keeps a temperature of 1e-6 from overflowing to inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        smallest = logits.topk(how.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if how.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        # A token stays while the mass BEFORE it is below top_p, so the most likely one always stays.
        drop = probs.cumsum(-1) - probs >= how.top_p
        drop[..., 0] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits.softmax(-1)


def uniform(rows: int, columns: int, generator: Generator, device: torch.device) -> Tensor:
    """[rows, columns] float64 in [0, 1). With a generator a row, what row b gets does not depend on the other rows."""
    if generator is None or isinstance(generator, torch.Generator):
        where = generator.device if generator is not None else device
        return torch.rand(rows, columns, generator=generator, dtype=torch.float64, device=where).to(device)
    if len(generator) != rows:
        raise ValueError(f"one generator a row: {rows} rows, found {len(generator)} generators")
    drawn = [torch.rand(columns, generator=one, dtype=torch.float64, device=one.device) for one in generator]
    return torch.stack(drawn).to(device)


def draw(weights: Tensor, generator: Generator = None, *, noise: Tensor | None = None) -> Tensor:
    """One id a row, with chances in proportion to `weights` [B, V] (>= 0, not all 0) -> [B]; an id of weight 0 never comes.

    `noise` [B], float64 in [0, 1), replaces the generator where the caller has drawn it already.
    """
    upto = weights.double().cumsum(-1)
    total = upto[:, -1:]
    if not bool((torch.isfinite(total) & (total > 0)).all()):
        raise ValueError("nothing to draw from: a row of weights is all zero, or not finite")
    if noise is None:
        noise = uniform(len(weights), 1, generator, weights.device)[:, 0]
    # u * total can round up to total itself; the step back keeps the answer on an id of positive weight.
    aim = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(upto, aim, right=True).squeeze(-1)


def flip(chance: Tensor, noise: Tensor) -> Tensor:
    """Independent coins: chances [B, K] and noise [B, K] in [0, 1) -> [B, K] bool; never True at 0, always at >= 1."""
    return noise < chance.double()
