"""A small language model drafts: its own cache, its own law, one forward a drafted token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.sampling import Generator, Sampling, draw, to_probs, uniform


class ModelDrafter:
    """Drafts with `model`, which must speak the target's token ids.

    `vocab_size` is the target's; draft ids beyond it are masked before the softmax, so no mass is lost to them. Rows
    that outgrow the draft's positions, or hold a token that it cannot embed, are no longer drafted for (`paused`).
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        self.model = model
        self.vocab_size = vocab_size
        embedding: Any = model.get_input_embeddings()
        self._known = int(embedding.weight.shape[0])

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        device = self.model.device
        self._lm = CachedLM(self.model, len(ids))
        self.paused = torch.zeros(len(ids), dtype=torch.bool, device=device)
        self._drafted = torch.empty(len(ids), 0, dtype=torch.long, device=device)
        # What the row holds and the cache does not yet; right-aligned, fed with the next proposal.
        self._pending, self._pending_valid = ids.to(device), valid.to(device)
        self._pause(1)
        if ids.shape[1]:
            there = self._pending_valid & ~self.paused[:, None]
            self._lm.extend(torch.where(there, self._pending, 0), there, keep=1)
        self._pending = last[:, None].to(device)
        self._pending_valid = torch.ones_like(self._pending, dtype=torch.bool)

    def propose(self, k: int, how: Sampling, generator: Generator = None) -> Proposal:
        batch, device = len(self._pending), self.model.device
        self._pause(k)
        ids, valid = self._pending, self._pending_valid & ~self.paused[:, None]
        tokens, laws = torch.empty(batch, 0, dtype=torch.long, device=device), []
        if k and not bool(self.paused.all()):
            ids = torch.where(valid, ids, 0)
            for _ in range(k):
                logits, _ = self._lm.extend(ids, valid, keep=1)
                laws.append(to_probs(logits[:, -1, : self.vocab_size], how))
                ids = draw(laws[-1], noise=uniform(batch, 1, generator, device)[:, 0])[:, None]
                valid = ~self.paused[:, None]
                tokens = torch.cat([tokens, ids], dim=1)
            self._pending, self._pending_valid = self._pending[:, :0], self._pending_valid[:, :0]
        self._drafted = tokens
        n = torch.where(self.paused, 0, tokens.shape[1])
        # At temperature 0 each law is one-hot on its token, which is what None says, without [B, K, V] numbers.
        probs = torch.stack(laws, dim=1) if laws and how.temperature > 0 else None
        return Proposal(tokens, probs, n)

    def observe(self, outcome: Outcome) -> None:
        accepted, following = outcome.accepted.to(self.model.device), outcome.next.to(self.model.device)
        k = self._drafted.shape[1]
        if k:
            # The cache holds the drafts but the last one, which was never fed.
            fed = k - 1
            self._lm.forget(torch.where(self.paused, 0, fed - accepted.clamp_max(fed)))
            self._pending = self._drafted[:, -1:]
            self._pending_valid = (accepted == k)[:, None]
        self._pending = torch.cat([self._pending, following[:, None]], dim=1)
        self._pending_valid = torch.cat([self._pending_valid, torch.ones_like(following[:, None], dtype=torch.bool)], dim=1)
        self._drafted = self._drafted[:, :0]

    def _pause(self, k: int) -> None:
        """Positions only grow and a foreign token stays in the context, so a paused row stays paused."""
        self.paused |= (self._pending_valid & (self._pending >= self._known)).any(-1)
        if self._lm.max_positions is not None:
            self.paused |= self._lm.lengths + self._pending_valid.sum(-1) + k - 1 > self._lm.max_positions
