"""The contract of a drafter. Any law q keeps the output lossless, so a drafter's bug only starves acceptance, in silence."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from draftsmith.specdec.sampling import Generator, Sampling


class Proposal(NamedTuple):
    """`tokens` [B, K], the laws they were drawn from `probs` [B, K, V] (None: each was certain), how many count: `n` [B].

    `parents` [B, K] is kept for trees of candidates (the
    column a token follows on, -1 for the last token of the text); None is a chain, and only chains are served.
    """

    tokens: Tensor
    probs: Tensor | None
    n: Tensor
    parents: Tensor | None = None


class Outcome(NamedTuple):
    """What became of the last proposal: `accepted` [B], the token behind them `next` [B], and for each asked-for target
    layer the hidden states of the tokens that were fed, [B, K+1, H]."""

    accepted: Tensor
    next: Tensor
    hidden: tuple[Tensor, ...] = ()


class Drafter(Protocol):
    """After any history, `propose` must give what a fresh drafter, begun on that history, would give (tested over DRAFTERS).

    Each round is one `propose` (k may be 0) and one `observe`. Token i of a proposal may depend on earlier tokens only.
    """

    hidden_layers: tuple[int, ...]  # which of the target's hidden states it wants; () for none

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...]) -> None:
        """A new batch: the texts without their last token, `ids` and `valid` [B, T]; that token, `last` [B]; hidden [B, T, H]."""

    def propose(self, k: int, how: Sampling, generator: Generator) -> Proposal: ...

    def observe(self, outcome: Outcome) -> None: ...


class Extras(Protocol):
    """What a drafter may have besides; the decoder asks for each only where it is there."""

    def select(self, rows: Tensor) -> None:
        """Only `rows` of the batch (indices, ascending) go on; asked between rounds. Without it ended rows
        are carried along, told of ordinary tokens."""

    def read(self) -> None:
        """Read the prompt now rather than with the first proposal; asked behind `begin`, where drafting is sure."""

    def share(self, lm: Any) -> Any:
        """Before `begin`, what the decoder is to read with in place of its `CachedLM` `lm`, which has read nothing yet: `lm` itself, or
        one that takes up what this drafter will have computed for it (`SplitLM`)."""

    def evidence(self) -> list[int]:
        """What each row's next proposal would rest on, before it is made: the length of a looked-up text, 0 for a model's own
        words, -1 for nothing to say. Without it a drafter is taken for a model."""

    def ways(self) -> list[list[int]]:
        """The ways in which its next proposal can be made, what each row's would rest on in each of them; the first is `evidence`. A pace
        that can tell them apart (`Adaptive.choose`) picks one, and `choose` is told; other paces get the first."""

    def choose(self, way: int) -> None:
        """The way of the next proposal, and of no other."""

    def notes(self) -> list[str]:
        """What a reader of the result should know, a line each (a row that could no longer be drafted for)."""
