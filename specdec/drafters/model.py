"""A small language model drafts: its own cache, its own law, one forward a drafted token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.sampling import Generator, Sampling, draw, to_probs, uniform


class ModelDrafter:
    """Drafts with `model`, which must speak the target's token ids.

    `vocab_size` is how many ids the target can say; draft ids beyond it are masked before the softmax, so no mass is lost
    to them. Rows that outgrow the draft's positions, or hold a token that it cannot embed, are no longer drafted for (`paused`).
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} leaves the draft no id to say; give the number of ids of the target")
        self.model = model
        self.vocab_size = vocab_size
        embedding: Any = model.get_input_embeddings()
        self._notes: dict[int, str] = {}
        self._known = int(embedding.weight.shape[0])

    @property
    def ids(self) -> int:
        """How many ids it can say."""
        return min(output_rows(self.model), self.vocab_size or output_rows(self.model))

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        batch, device = len(ids), self.model.device
        self._lm = CachedLM(self.model, batch)
        if reason := self._lm.cannot_roll_back():
            raise ValueError(f"as a draft: {reason}")
        self._rows = list(range(batch))  # which row of the prompts each row was, for the notes
        self._notes = {}
        self.paused = torch.zeros(batch, dtype=torch.bool, device=device)
        self._said = torch.empty(batch, 0, dtype=torch.long, device=device)
        self._fed = torch.zeros(batch, dtype=torch.long, device=device)  # how many of the tokens just said the cache holds
        # What the row holds and the cache does not yet; right-aligned, fed with the next proposal.
        ends = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self._pending = torch.cat([ids.to(device), last[:, None].to(device)], dim=1)
        self._pending_valid = torch.cat([valid.to(device), ends], dim=1)

    def read(self) -> None:
        """Feed what is pending but for each row's last token, so that the first proposal is no dearer than the next."""
        self._room()
        there = self._pending_valid[:, :-1]
        if bool(there.any()):
            self._feed(torch.where(there, self._pending[:, :-1], 0), there)
            self._pending, self._pending_valid = self._pending[:, -1:], self._pending_valid[:, -1:]

    def propose(self, k: int, how: Sampling, generator: Generator = None, rows: Tensor | None = None) -> Proposal:
        """Up to `k` tokens for each of `rows` [B] (bool; None for all). The others rest: nothing of theirs is fed, and
        `observe` must be told what was said for them."""
        batch, device = len(self._pending), self.model.device
        n = self._room().clamp(0, k)  # a row near the end of the draft's positions drafts what still fits
        if rows is not None:
            n = torch.where(rows.to(device), n, 0)
        tokens, laws = torch.empty(batch, 0, dtype=torch.long, device=device), []
        if bool((n > 0).any()):
            valid = self._pending_valid & (n > 0)[:, None]
            self._pending_valid = self._pending_valid & ~valid
            used = valid.any(0)  # a column of resting rows alone would be one more to mask
            ids, valid = torch.where(valid, self._pending, 0)[:, used], valid[:, used]
            for step in range(int(n.max())):
                logits = self._feed(ids, valid)[:, -1, : self.vocab_size]
                if how.temperature == 0:
                    ids = logits.argmax(-1, keepdim=True)
                else:
                    laws.append(to_probs(logits, how))
                    ids = draw(laws[-1], noise=uniform(batch, 1, generator, device)[:, 0])[:, None]
                tokens = torch.cat([tokens, ids], dim=1)
                valid = (n > step + 1)[:, None]
        self._said, self._fed = tokens, (n - 1).clamp_min(0)  # a row's last draft is never fed
        # At temperature 0 each law is one-hot on its token, which is what None says, without [B, K, V] numbers.
        probs = torch.stack(laws, dim=1) if laws else None
        return Proposal(tokens, probs, n, torch.zeros_like(n))

    def observe(self, outcome: Outcome, said: Proposal | None = None) -> None:
        """`said` is what was proposed to the target, where others spoke for the rows that rested."""
        device = self.model.device
        accepted, following = outcome.accepted.to(device), outcome.next.to(device)
        tokens = self._said if said is None else said.tokens.to(device)
        if bool((self._fed > 0).any()):
            self._lm.forget(self._fed - torch.minimum(accepted, self._fed))
        place = torch.arange(tokens.shape[1], device=device)
        new = (place >= self._fed[:, None]) & (place < accepted[:, None])  # kept, and not in the cache
        pending = torch.cat([self._pending, tokens, following[:, None]], dim=1)
        valid = torch.cat([self._pending_valid, new, torch.ones_like(following[:, None], dtype=torch.bool)], dim=1)
        order = valid.long().argsort(dim=1, stable=True)[:, -int(valid.sum(1).max()) :]
        self._pending, self._pending_valid = pending.gather(1, order), valid.gather(1, order)
        self._said, self._fed = tokens[:, :0], torch.zeros_like(self._fed)

    def select(self, rows: Tensor) -> None:
        rows = rows.to(self.model.device)
        self._lm.select(rows)
        self._rows = [self._rows[row] for row in rows.tolist()]
        self.paused, self._said, self._fed = self.paused[rows], self._said[rows], self._fed[rows]
        self._pending, self._pending_valid = self._pending[rows], self._pending_valid[rows]

    def evidence(self) -> list[int]:
        """0 for a row that the model speaks for, -1 for one that it cannot."""
        self._room()
        return [-1 if paused else 0 for paused in self.paused.tolist()]

    def notes(self) -> list[str]:
        """A line for each row that is no longer drafted for, and why."""
        return [self._notes[row] for row in sorted(self._notes)]

    def _feed(self, ids: Tensor, valid: Tensor) -> Tensor:
        """The logits behind the last column, [B, 1, V]."""
        first = not self._lm.columns
        logits, _ = self._lm.extend(ids, valid, keep=1)
        if first and (reason := self._lm.cannot_roll_back()):  # some layers know it only once they hold something
            raise ValueError(f"as a draft: {reason}")
        return logits

    def _room(self) -> Tensor:
        """How many tokens each row can still draft: [B]. Text only grows, so a row with no room is paused for good."""
        strange = self._pending_valid & (self._pending >= self._known)
        self._pause(
            strange.any(-1), f"holds an id that the draft cannot embed (it has 0..{self._known - 1}) and was decoded plainly"
        )
        if self._lm.max_positions is None:
            room = torch.full_like(self._fed, torch.iinfo(torch.long).max)
        else:
            room = self._lm.max_positions - self._lm.lengths - self._pending_valid.sum(-1) + 1
        if self._lm.window is not None and len(room) > 1:  # a window counts columns, and rows of a batch share them
            left = self._lm.window - self._lm.columns - self._pending.shape[1] + 1
            self._pause(
                torch.full_like(self.paused, left < 1),
                f"would not fit the draft's window of {self._lm.window} in a batch and was decoded plainly",
            )
            room = room.clamp_max(max(left, 0))
        self._pause(room < 1, f"outgrew the draft's {self._lm.max_positions} positions and was decoded plainly")
        return torch.where(self.paused, 0, room)

    def _pause(self, which: Tensor, why: str) -> None:
        for row in (which & ~self.paused).nonzero()[:, 0].tolist():
            self._notes[self._rows[row]] = f"row {self._rows[row]} {why}"
        self.paused |= which
        # What it still gets need not be kept; its last token alone says that there is a row.
        self._pending_valid = self._pending_valid & ~self.paused[:, None]
