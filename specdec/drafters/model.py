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
        self._n = torch.zeros(len(ids), dtype=torch.long, device=device)
        # What the row holds and the cache does not yet; right-aligned, fed with the next proposal.
        self._pending, self._pending_valid = ids.to(device), valid.to(device)
        self._room()
        there = self._pending_valid & ~self.paused[:, None]
        if bool(there.any()):
            self._lm.extend(torch.where(there, self._pending, 0), there, keep=1)
            if reason := self._lm.cannot_roll_back():
                raise ValueError(f"as a draft: {reason}")
        self._pending = last[:, None].to(device)
        self._pending_valid = torch.ones_like(self._pending, dtype=torch.bool)

    def propose(self, k: int, how: Sampling, generator: Generator = None) -> Proposal:
        batch, device = len(self._pending), self.model.device
        self._n = self._room().clamp(0, k)  # a row near the end of the draft's positions drafts what still fits
        tokens, laws = torch.empty(batch, 0, dtype=torch.long, device=device), []
        if bool((self._n > 0).any()):
            valid = self._pending_valid & (self._n > 0)[:, None]
            used = valid.any(0)  # a refused last draft is in no row: without its column one row needs no mask
            ids, valid = torch.where(valid, self._pending, 0)[:, used], valid[:, used]
            for step in range(int(self._n.max())):
                logits, _ = self._lm.extend(ids, valid, keep=1)
                laws.append(to_probs(logits[:, -1, : self.vocab_size], how))
                ids = draw(laws[-1], noise=uniform(batch, 1, generator, device)[:, 0])[:, None]
                tokens = torch.cat([tokens, ids], dim=1)
                valid = (self._n > step + 1)[:, None]
            self._pending, self._pending_valid = self._pending[:, :0], self._pending_valid[:, :0]
        self._drafted = tokens
        # At temperature 0 each law is one-hot on its token, which is what None says, without [B, K, V] numbers.
        probs = torch.stack(laws, dim=1) if laws and how.temperature > 0 else None
        return Proposal(tokens, probs, self._n)

    def observe(self, outcome: Outcome) -> None:
        accepted, following = outcome.accepted.to(self.model.device), outcome.next.to(self.model.device)
        if self._drafted.shape[1]:
            # The cache holds a row's drafts but its last one, which was never fed.
            fed = (self._n - 1).clamp_min(0)
            self._lm.forget(fed - torch.minimum(accepted, fed))
            self._pending = self._drafted.gather(1, fed[:, None])
            self._pending_valid = ((accepted == self._n) & (self._n > 0))[:, None]
        self._pending = torch.cat([self._pending, following[:, None]], dim=1)
        self._pending_valid = torch.cat([self._pending_valid, torch.ones_like(following[:, None], dtype=torch.bool)], dim=1)
        self._drafted = self._drafted[:, :0]

    def _room(self) -> Tensor:
        """How many tokens each row can still draft: [B]. Text only grows, so a row with no room is paused for good."""
        self.paused |= (self._pending_valid & (self._pending >= self._known)).any(-1)
        if self._lm.max_positions is None:
            room = torch.full_like(self._n, torch.iinfo(torch.long).max)
        else:
            room = self._lm.max_positions - self._lm.lengths - self._pending_valid.sum(-1) + 1
        self.paused |= room < 1
        return torch.where(self.paused, 0, room)
