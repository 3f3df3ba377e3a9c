"""N-gram lookup drafts for nothing: what followed the last few tokens when they occurred before, in the row or in a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.drafters.suffixes import Reader, Suffixes
from draftsmith.specdec.sampling import Generator, Sampling

DOUBT = 2.0  # see `chance`; measured on SmolLM2's answers, where 1.5 to 3 do about as well


class NgramDrafter:
    """Looks up the last `longest` tokens of prompt and output, then fewer, down to `shortest`, anew for every drafted token.

    What followed the longest context most often is said, the last of equals. The row's own text and `corpus` (lists of ids,
    such as past answers) name one token each, and the likelier is said. Drafting ends where the chance that all of it is
    right, by the counts, falls below `least`. Its tokens are certain: q is one-hot.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, longest: int = 8, shortest: int = 1, corpus: Iterable[Sequence[int]] | None = None, least: float = 0.15
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"an n-gram lookup needs 1 <= shortest <= longest, found {shortest} and {longest}")
        if not 0 <= least < 1:
            raise ValueError(f"least is a chance in [0, 1), found {least}; 0 drafts whatever there is")
        self.longest, self.shortest, self.least = longest, shortest, least
        self._corpus = _contexts(corpus, longest) if corpus is not None else None

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        self._rows = [_Row(self.longest, self._corpus) for _ in range(len(ids))]
        for row, prompt, real, token in zip(self._rows, ids.tolist(), valid.tolist(), last.tolist(), strict=True):
            row.append([one for one, exists in zip(prompt, real, strict=True) if exists] + [token])
        self._proposed: list[list[int]] = [[] for _ in self._rows]
        self.matches = [0] * len(self._rows)  # the length of the context that each row's last proposal followed

    def propose(self, k: int, how: Sampling, generator: Generator = None) -> Proposal:
        found = [row.continuation(k, self.shortest, self.least) for row in self._rows]
        self._proposed, self.matches = [tokens for tokens, _ in found], [match for _, match in found]
        n = [len(one) for one in self._proposed]
        tokens = torch.tensor([one + [0] * (max(n) - len(one)) for one in self._proposed], dtype=torch.long)
        return Proposal(tokens.reshape(len(found), max(n)), None, torch.tensor(n))

    def observe(self, outcome: Outcome, said: Proposal | None = None) -> None:
        """`said` is what was proposed to the target, where that was not this drafter's own proposal."""
        proposed = self._proposed if said is None else said.tokens.tolist()
        for row, tokens, accepted, token in zip(
            self._rows, proposed, outcome.accepted.tolist(), outcome.next.tolist(), strict=True
        ):
            row.append([*tokens[:accepted], token])
        self._proposed = [[] for _ in self._rows]

    def select(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]
        self._proposed = [[] for _ in self._rows]

    def evidence(self) -> list[int]:
        """The length of the match that each row's next proposal rests on, -1 where there will be none."""
        return [match or -1 for _, match in (row.continuation(1, self.shortest, self.least) for row in self._rows)]

    def notes(self) -> list[str]:
        return []


class _Row:
    """One row's own contexts, and where it stands among those of the corpus, if there is one."""

    def __init__(self, longest: int, corpus: Suffixes | None) -> None:
        self.own, self.corpus = Suffixes(longest), [Reader(corpus)] if corpus is not None else []

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            self.own.append(token)
            for reader in self.corpus:
                reader.read(token)

    def continuation(self, k: int, shortest: int, least: float) -> tuple[list[int], int]:
        """Up to `k` tokens, and the length of the context that the first of them followed."""
        readers = [*(reader.copy() for reader in self.corpus), Reader(self.own)]  # the row's own text corrects the corpus
        said: list[int] = []
        first, all_right = 0, 1.0
        while len(said) < k:
            candidates = {token for match, token in (reader.best() for reader in readers) if match >= shortest}
            if not candidates:
                break
            best, match, token = max((*chance(one, readers), one) for one in candidates)
            all_right *= best
            if all_right < least:
                break
            first = first or match
            said.append(token)
            for reader in readers:
                reader.read(token)
        return said, first


def _contexts(corpus: Iterable[Sequence[int]], depth: int) -> Suffixes:
    contexts = Suffixes(depth)
    for text in corpus:
        for token in text:
            contexts.append(token)
        contexts.close()
    return contexts


def chance(token: int, readers: Sequence[Reader]) -> tuple[float, int]:
    """The chance of `token`, and the length of the longest context that it followed.

    Each longer context corrects the shorter one's estimate, which counts as `DOUBT` occurrences of it: so one long match
    is worth more than one short one, and many occurrences more than one. Later readers correct earlier ones.
    """
    right, longest = 0.0, 0
    for reader in readers:
        for length, (count, total) in enumerate(reader.seen(token)):
            if length:  # how common a token is, is no evidence
                right = (count + DOUBT * right) / (total + DOUBT)
                if count and length > longest:
                    longest = length
    return right, longest
