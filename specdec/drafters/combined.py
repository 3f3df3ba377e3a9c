"""N-gram lookup where its match is long, a model elsewhere: a repeat costs no draft forward, and new text is not left to a lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.drafters.model import ModelDrafter
from draftsmith.specdec.drafters.ngram import NgramDrafter
from draftsmith.specdec.sampling import Generator, Sampling

BY_MATCH, LOOKUP, MODEL = range(3)  # ways to propose


class CombinedDrafter:
    """Row by row: `ngram` speaks where its match is `min_match` tokens or longer, or where `model` cannot; else `model` does.

    An adaptive pace may have it otherwise for a round, by what each has been worth: the lookup alone, whatever the length of its match, or
    the model alone. A row's laws are one-hot where the lookup spoke and the model's where the model did. The model runs only when it speaks
    for some row, and reads what the lookup said for a row the next time it speaks for that row.
    """

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter, min_match: int = 3) -> None:
        if min_match < 1:
            raise ValueError(f"min_match={min_match} must be >= 1: the length of a match from which on the lookup speaks")
        self.ngram, self.drafter, self.min_match = ngram, model, min_match
        self.hidden_layers: tuple[int, ...] = model.hidden_layers  # a lookup wants none

    @property
    def ids(self) -> int:
        return self.drafter.ids

    @property
    def model(self) -> torch.nn.Module:
        return self.drafter.model

    def share(self, lm: Any) -> Any:
        return self.drafter.share(lm) if hasattr(self.drafter, "share") else lm

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        self.ngram.begin(ids, valid, last)
        self.drafter.begin(ids, valid, last, hidden)
        self._way = BY_MATCH
        self.matches = [0] * len(ids)  # of each row's last proposal: the match of a lookup, 0 for the model's own words

    def read(self) -> None:
        self.drafter.read()

    def propose(self, k: int, how: Sampling, generator: Generator = None) -> Proposal:
        way, self._way = self._way, BY_MATCH
        looked_up = self.ngram.propose(0 if way == MODEL else k, how)
        speaks = looked_up.n > 0
        if way == BY_MATCH:
            speaks &= self._long(self.ngram.matches, self.drafter.evidence())
        drawn = self.drafter.propose(k, how, generator, rows=torch.zeros_like(speaks) if way == LOOKUP else ~speaks)
        device, width = drawn.tokens.device, max(looked_up.tokens.shape[1], drawn.tokens.shape[1])
        speaks = speaks.to(device)
        found = pad(looked_up.tokens.to(device), (0, width - looked_up.tokens.shape[1]))
        tokens = torch.where(speaks[:, None], found, pad(drawn.tokens, (0, width - drawn.tokens.shape[1])))
        probs = drawn.probs
        if probs is not None:
            known = probs.shape[-1]
            size = max(known, int(found.max()) + 1)  # a lookup may repeat an id that the model has not
            certain = one_hot(found, size).to(probs.dtype)
            probs = pad(probs, (0, size - known, 0, width - probs.shape[1]))
            probs = torch.where(speaks[:, None, None], certain, probs)
        n = torch.where(speaks, looked_up.n.to(device), drawn.n)
        self.matches = [match if found else 0 for match, found in zip(self.ngram.matches, speaks.tolist(), strict=True)]
        self._said = Proposal(tokens, probs, n)
        return self._said

    def observe(self, outcome: Outcome) -> None:
        self.ngram.observe(outcome, self._said)
        self.drafter.observe(outcome, self._said)

    def select(self, rows: Tensor) -> None:
        self.ngram.select(rows)
        self.drafter.select(rows)

    def evidence(self) -> list[int]:
        """The match where the lookup will speak, 0 where the model will, -1 where neither can."""
        return self.ways()[BY_MATCH]

    def ways(self) -> list[list[int]]:
        """By the length of the match, by the lookup alone, by the model alone."""
        matches, own = self.ngram.evidence(), self.drafter.evidence()
        long = self._long(matches, own).tolist()
        return [[match if speaks else model for match, speaks, model in zip(matches, long, own, strict=True)], matches, own]

    def choose(self, way: int) -> None:
        self._way = way

    def notes(self) -> list[str]:
        return [*self.ngram.notes(), *self.drafter.notes()]

    def _long(self, matches: list[int], own: list[int]) -> Tensor:
        """Where the lookup is to speak by its match: [B] bool. Beside a model that cannot, any match will do."""
        least = [self.min_match if one == 0 else 1 for one in own]
        return torch.tensor([match >= one for match, one in zip(matches, least, strict=True)])
