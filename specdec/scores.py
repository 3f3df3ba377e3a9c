"""From the target's logits to the verdict: padding rows, processors and an early EOS are masked, in that order, then the rule decides."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.specdec.drafters.base import Proposal
from draftsmith.specdec.processors import PrefixProcessors
from draftsmith.specdec.rows import Rows
from draftsmith.specdec.sampling import Generator, to_probs
from draftsmith.specdec.settings import Settings
from draftsmith.specdec.verify import VERIFY, Verdict, verify_greedy


class Scores:
    """The masks and processors of one call, for the rows that are still written."""

    def __init__(self, asked: Settings, prompts: list[list[int]], logprobs: bool) -> None:
        self._asked, self._prompts, self._logprobs = asked, list(prompts), logprobs
        self._processors = PrefixProcessors(asked.processors, len(prompts)) if asked.processors else None

    def decide(
        self, logits: Tensor, proposal: Proposal, drafts: list[list[int]], n: list[int], rows: Rows, generator: Generator
    ) -> tuple[Verdict, list[list[float]] | None]:  # fmt: skip
        """The verdict on the first n[b] drafts of each row, and the log-probabilities of what it leaves, if asked for."""
        how, n_draft = self._asked.how, torch.tensor(n, device=logits.device)
        logits = self._real(logits)
        shown = self._sayable(logits, rows.texts, drafts, rows.counted(n))
        if how.temperature == 0:
            verdict = verify_greedy(shown, proposal.tokens, n_draft)
        else:
            verdict = VERIFY[self._asked.verify](to_probs(shown, how), proposal.probs, proposal.tokens, n_draft, generator)
        if self._processors is not None:  # what they remember of drafts that were refused is forgotten
            self._processors.keep(verdict.accepted.tolist())
        return verdict, _own_logprobs(logits, proposal.tokens, verdict) if self._logprobs else None

    def select(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self._prompts = [self._prompts[row] for row in rows]
        if self._processors is not None:
            self._processors.select(rows)

    def _real(self, logits: Tensor) -> Tensor:
        """[B, K+1, V] with no chance for the rows of the head that are no ids."""
        if self._asked.vocabulary == self._asked.rows:
            return logits
        logits = logits.clone()
        logits[..., self._asked.vocabulary :] = -torch.inf
        return logits

    def _sayable(self, logits: Tensor, texts: list[list[int]], drafts: list[list[int]], n: list[int]) -> Tensor:
        """What may be said at each column: [B, K+1, V]. Row b wrote `texts[b]`, n[b] of `drafts[b]` count, n[b] < 0 in ended rows."""
        if self._processors is not None:
            prefixes = [[*prompt, *text] for prompt, text in zip(self._prompts, texts, strict=True)]
            logits = self._real(self._processors(logits, prefixes, drafts, n, self._asked.how.temperature == 0))
        if self._asked.min_new_tokens and self._asked.ends:
            logits = self._without_early_end(logits, torch.tensor([len(text) for text in texts], device=logits.device))
        return logits

    def _without_early_end(self, logits: Tensor, written: Tensor) -> Tensor:
        """EOS is impossible while a row has fewer than `min_new_tokens`; column j stands behind j drafted ones."""
        place = written[:, None] + torch.arange(logits.shape[1], device=logits.device)
        banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        banned[sorted(self._asked.ends)] = True
        return logits.masked_fill((place < self._asked.min_new_tokens)[..., None] & banned, -torch.inf)


def _own_logprobs(logits: Tensor, drafts: Tensor, verdict: Verdict) -> list[list[float]]:
    """For each row the log-probabilities of its accepted drafts and of the token behind them."""
    rows = torch.arange(len(drafts), device=drafts.device)
    said = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    said[rows, verdict.accepted] = verdict.next
    own = logits.float().log_softmax(-1).gather(-1, said[..., None]).squeeze(-1).tolist()
    return [row[: count + 1] for row, count in zip(own, verdict.accepted.tolist(), strict=True)]
