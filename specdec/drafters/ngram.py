"""N-gram lookup drafts for nothing: what followed the last few tokens when they last occurred in the row."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.sampling import Generator, Sampling


class NgramDrafter:
    """Looks up the last `longest` tokens of prompt and output, then fewer, down to `shortest` (prompt lookup decoding).

    The longest match wins, the most recent of equals, and its continuation is copied; where that runs into the end of
    the text it goes on through the copy itself, so a loop is drafted whole. Its tokens are certain: q is one-hot.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, longest: int = 4, shortest: int = 1) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"an n-gram lookup needs 1 <= shortest <= longest, found {shortest} and {longest}")
        self.longest, self.shortest = longest, shortest

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        self._rows = [_Row(self.longest, self.shortest) for _ in range(len(ids))]
        for row, prompt, real, token in zip(self._rows, ids.tolist(), valid.tolist(), last.tolist(), strict=True):
            row.append([one for one, exists in zip(prompt, real, strict=True) if exists] + [token])
        self._proposed: list[list[int]] = [[] for _ in self._rows]

    def propose(self, k: int, how: Sampling, generator: Generator = None) -> Proposal:
        self._proposed = [row.continuation(k) for row in self._rows]
        n = torch.tensor([len(one) for one in self._proposed])
        tokens = torch.tensor([one + [0] * (int(n.max()) - len(one)) for one in self._proposed], dtype=torch.long)
        return Proposal(tokens.reshape(len(self._rows), int(n.max())), None, n)

    def observe(self, outcome: Outcome) -> None:
        for row, proposed, accepted, token in zip(
            self._rows, self._proposed, outcome.accepted.tolist(), outcome.next.tolist(), strict=True
        ):
            row.append([*proposed[:accepted], token])
        self._proposed = [[] for _ in self._rows]


class _Row:
    """One row's tokens and, for every n-gram in them that something follows, the place of what followed it last."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.tokens: list[int] = []
        self.sizes = range(longest, shortest - 1, -1)
        self.followed_at: dict[tuple[int, ...], int] = {}

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            here = len(self.tokens)
            for size in self.sizes:  # only now does something follow the n-grams that end before `here`
                if size <= here:
                    self.followed_at[tuple(self.tokens[here - size : here])] = here
            self.tokens.append(token)

    def continuation(self, k: int) -> list[int]:
        end = len(self.tokens)
        for size in self.sizes:
            place = self.followed_at.get(tuple(self.tokens[end - size :])) if size <= end else None
            if place is not None:
                copied: list[int] = []
                for at in range(place, place + k):
                    copied.append(self.tokens[at] if at < end else copied[at - end])
                return copied
        return []
