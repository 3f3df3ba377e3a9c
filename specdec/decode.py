"""Draft, verify, keep, repeat. Plain decoding is this same loop without a drafter, so the two are timed by one ruler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal
from draftsmith.specdec.drafting import choose, proposed, refuse_pair
from draftsmith.specdec.noise import RowNoise
from draftsmith.specdec.pace import Fixed, Pace, Round
from draftsmith.specdec.result import Generation, Written, warnings
from draftsmith.specdec.rows import Rows
from draftsmith.specdec.sampling import Sampling
from draftsmith.specdec.scores import Scores
from draftsmith.specdec.settings import Settings, checked
from draftsmith.specdec.split import SplitLM
from draftsmith.specdec.verify import Verdict


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: list[list[int]],
    drafter: Drafter | None = None,
    *,
    k: int = 4,
    max_new_tokens: int = 64,
    how: Sampling = Sampling(),
    eos: Iterable[int] | int | None = frozenset(),
    seed: int | Sequence[int] = 0,
    pace: Pace | None = None,
    verify: str = "token",
    processors: Sequence[Any] = (),
    stop_strings: Sequence[str] | str = (),
    min_new_tokens: int = 0,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    logprobs: bool = False,
    on_tokens: Callable[[Written], None] | None = None,
) -> Generation:
    """Continue `prompts` (lists of token ids) as the target alone would, with fewer sequential steps.

    At temperature 0 in fp32 the tokens are the target's own greedy ones; above it they follow the target's law under
    `how`. `k` tokens are drafted a round unless `pace` decides. `eos` ends a row and is kept. One `seed` serves all
    rows (each gets a stream of its own); a list gives every row its own, and its output then does not depend on its
    neighbours. A speculative and a plain run of one seed differ at temperature > 0 while their laws agree.

    `processors` are transformers' LogitsProcessors (or callables of ids [1, L], scores [1, V]), called for every position
    with the prefix that plain decoding would show them, on a copy of each a row. `stop_strings` are looked for in the text
    of the output and need `tokenizer`; neither they nor `eos` end a row of fewer than `min_new_tokens`. `vocab_size` is
    how many ids are real, where the head has rows that only pad it. `on_tokens` is told of every round as it is written.
    """
    asked = checked(
        target, prompts, k=k, max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, how=how, eos=eos, seed=seed, verify=verify,
        processors=processors, stop_strings=stop_strings, tokenizer=tokenizer, vocab_size=vocab_size,
    )  # fmt: skip
    pace = pace if pace is not None else Fixed(k if drafter is not None else 0)
    batch = len(prompts)
    out = Generation([[] for _ in prompts], [[] for _ in prompts], ["length"] * batch, [[] for _ in prompts] if logprobs else None)
    out.settings = asked.in_force(target, pace)
    started = time.perf_counter()
    if max_new_tokens:
        rows = Rows(prompts, asked, tokenizer, on_tokens, out)
        _Run(target, prompts, drafter, asked, pace, rows, out).to_the_end(prompts)
        out.warnings = warnings(target, drafter)
    out.seconds = time.perf_counter() - started
    return out


class _Run:
    """One call of `generate`: the target's cache, the drafter, and the rows that both write."""

    def __init__(
        self, target: PreTrainedModel, prompts: list[list[int]], drafter: Drafter | None, asked: Settings, pace: Pace, rows: Rows, out: Generation
    ) -> None:  # fmt: skip
        self.clock = time.perf_counter()
        self.asked, self.pace, self.rows, self.out, self.device = asked, pace, rows, out, target.device
        self.drafter: Any = drafter  # it may have some of drafters.base.Extras
        self.noise = RowNoise(asked.seed, len(prompts), asked.how.temperature > 0)
        self.scores = Scores(asked, prompts, out.logprobs is not None)
        self.layers = drafter.hidden_layers if drafter is not None else ()
        self.can_select = drafter is None or hasattr(drafter, "select")
        self.lm: CachedLM | SplitLM = CachedLM(target, len(prompts))
        self.lm.refuse_ahead(asked.columns(prompts, drafter is not None), drafter is not None)
        if drafter is not None:
            refuse_pair(self.lm, drafter, asked.rows)
            if share := getattr(drafter, "share", None):
                began = time.perf_counter()
                self.lm = share(self.lm)
                # What it tries, once a drafter, is no part of a prefill that a pace may learn from.
                self.clock += time.perf_counter() - began

    def to_the_end(self, prompts: list[list[int]]) -> None:
        self.prefill(prompts)
        while not all(self.rows.done):
            if any(self.rows.done) and self.can_select:
                self.drop()
            self.round()

    def prefill(self, prompts: list[list[int]]) -> None:
        """The target reads the prompts and says each row's first token; the drafter begins behind that."""
        ids, valid = _pad_left(prompts, self.device)
        self.noise.next_round(self.rows.texts)
        logits, hidden = self.lm.extend(ids, valid, self.layers, keep=1)
        nothing = proposed(None, 0, self.asked.how, None, len(prompts), self.asked.rows, self.device)
        none, no_drafts = [0] * len(prompts), [list[int]() for _ in prompts]
        verdict, own = self.scores.decide(logits, nothing, no_drafts, none, self.rows, self.noise.verify)
        self.last = verdict.next
        self.pace.begin(_since(self.clock, self.device), self.asked.max_new_tokens)
        self.rows.write(no_drafts, none, none, self.last.tolist(), own)
        if self.drafter is not None and not all(self.rows.done):
            # Asked anew: some caches know what they cannot do only once they hold something.
            refuse_pair(self.lm, self.drafter, self.asked.rows)
            self.drafter.begin(ids, valid, self.last, hidden)
            if self.pace.sure and hasattr(self.drafter, "read"):
                self.drafter.read()
        self.out.prefill_seconds = _since(self.clock, self.device)

    def round(self) -> None:
        rows = self.rows
        going, room = rows.going(), rows.room()
        self.noise.next_round(rows.texts)
        clock = time.perf_counter()
        k, evidence = choose(self.pace, self.drafter, len(room), going)
        k = min(k, max(room))
        proposal = proposed(self.drafter, k, self.asked.how, self.noise.draft, len(room), self.asked.rows, self.device)
        drafts, n = proposal.tokens.tolist(), [min(one, here) for one, here in zip(proposal.n.tolist(), room, strict=True)]
        draft_seconds = _since(clock, self.device)

        clock = time.perf_counter()
        logits, hidden = self.call(proposal, n)
        verdict, own = self.scores.decide(logits, proposal, drafts, n, rows, self.noise.verify)
        accepted = verdict.accepted.tolist()
        self.lm.forget([0 if done else had - kept for done, had, kept in zip(rows.done, n, accepted, strict=True)])
        target_seconds = _since(clock, self.device)

        rows.write(drafts, n, accepted, verdict.next.tolist(), own)
        clock = time.perf_counter()
        if not all(rows.done):
            self.tell(verdict, hidden)
        draft_seconds += _since(clock, self.device)
        self.out.draft_seconds += draft_seconds
        self.out.target_seconds += target_seconds
        n, accepted = [n[slot] for slot in going], [accepted[slot] for slot in going]
        self.pace.observe(Round(k, proposal.tokens.shape[1] + 1, n, accepted, evidence, draft_seconds, target_seconds))

    def call(self, proposal: Proposal, n: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One forward of the target over each row's last token and drafts: logits [B, K+1, V], hidden states."""
        fed = torch.cat([self.last[:, None], proposal.tokens], dim=1)  # [B, K+1]
        exists = None
        if min(n) + 1 < fed.shape[1] or any(self.rows.done):
            counts = torch.tensor(self.rows.counted(n), device=self.device)
            exists = torch.arange(fed.shape[1], device=self.device) <= counts[:, None]
        return self.lm.extend(fed, exists, self.layers)

    def tell(self, verdict: Verdict, hidden: tuple[Tensor, ...]) -> None:
        """The drafter hears what became of its proposal; of a row that has ended an ordinary token, so that it needs no notion of those."""
        last, stayed = verdict.next, verdict.accepted
        if any(self.rows.done):
            ended = torch.tensor(self.rows.done, device=self.device)
            last, stayed = torch.where(ended, self.last, last), stayed.masked_fill(ended, 0)
        self.last = last
        if self.drafter is not None:
            self.drafter.observe(Outcome(stayed, last, hidden))

    def drop(self) -> None:
        """Finished rows leave the caches, so that nothing is computed for them any more."""
        left = self.rows.drop()
        index = torch.tensor(left, device=self.device)
        self.lm.select(index)
        if self.drafter is not None:
            self.drafter.select(index)
        self.noise.select(left)
        self.scores.select(left)
        self.last = self.last[index]


def _pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, T], valid [B, T])."""
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    empty = ids.shape[1] - torch.tensor([len(prompt) for prompt in prompts])
    return ids.to(device), (torch.arange(ids.shape[1]) >= empty[:, None]).to(device)


def _since(clock: float, device: torch.device) -> float:
    """Seconds since `clock`, with what the device had still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - clock
