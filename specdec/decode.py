"""Draft, verify, keep, repeat. Plain decoding is this same loop without a drafter, so the two are timed by one ruler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal, proposed
from draftsmith.specdec.noise import RowNoise
from draftsmith.specdec.pace import A_MODEL, Fixed, Pace, Round
from draftsmith.specdec.result import Generation, Written, warnings
from draftsmith.specdec.sampling import Sampling, to_probs
from draftsmith.specdec.scores import Scores, own_logprobs
from draftsmith.specdec.settings import Settings, checked
from draftsmith.specdec.split import SplitLM
from draftsmith.specdec.text import StopStrings
from draftsmith.specdec.verify import VERIFY, Verdict, verify_greedy


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
        _Run(target, prompts, drafter, asked, pace, tokenizer, on_tokens, out).to_the_end()
        out.warnings = warnings(target, drafter)
    out.seconds = time.perf_counter() - started
    return out


class _Run:
    """One call of `generate`: the caches, and a slot for every row that is not finished yet."""

    def __init__(
        self, target: PreTrainedModel, prompts: list[list[int]], drafter: Drafter | None, asked: Settings, pace: Pace,
        tokenizer: Any, on_tokens: Callable[[Written], None] | None, out: Generation,
    ) -> None:  # fmt: skip
        clock = time.perf_counter()
        self.asked, self.pace = asked, pace
        self.drafter: Any = drafter  # it may have some of drafters.base.Extras
        self.on_tokens, self.out, self.device = on_tokens, out, target.device
        self.rows = list(range(len(prompts)))  # which row each slot holds
        self.done = [False] * len(prompts)
        self.noise = RowNoise(asked.seed, len(prompts), asked.how.temperature > 0)
        self.scores = Scores(asked, prompts)
        self.stops = [StopStrings(tokenizer, asked.stop_strings, prompt) for prompt in prompts] if asked.stop_strings else None
        self.layers = drafter.hidden_layers if drafter is not None else ()
        self.can_select = drafter is None or hasattr(drafter, "select")
        self.lm: CachedLM | SplitLM = CachedLM(target, len(prompts))
        self.lm.refuse_ahead(_columns(prompts, asked, drafter is not None), drafter is not None)
        if drafter is not None:
            self.refuse_the_pair()
            if share := getattr(drafter, "share", None):
                began = time.perf_counter()
                self.lm = share(self.lm)
                clock += (
                    time.perf_counter() - began
                )  # what it tries, once a drafter, is no part of a prefill that a pace may learn from
        self.prefill(prompts, clock)

    def refuse_the_pair(self) -> None:
        """ValueError where this drafter cannot serve this target, whatever the text."""
        if reason := self.lm.cannot_roll_back():
            raise ValueError(reason)
        says, rows = getattr(self.drafter, "ids", 0), self.asked.rows
        if says > rows:
            raise ValueError(
                f"the draft says ids 0..{says - 1}, the target has 0..{rows - 1}: give the drafter vocab_size={rows}, so that the rest "
                "is masked before the softmax"
            )

    def prefill(self, prompts: list[list[int]], clock: float) -> None:
        """The target reads the prompts and says each row's first token; the drafter begins behind that."""
        ids, valid = _pad_left(prompts, self.device)
        self.noise.next_round(self.out.tokens)
        logits, hidden = self.lm.extend(ids, valid, self.layers, keep=1)
        nothing = proposed(None, 0, self.asked.how, None, len(prompts), self.asked.rows, self.device)
        none = [0] * len(prompts)
        verdict, own = self.decide(logits, nothing, [[] for _ in prompts], none)
        self.last = verdict.next
        _sync(self.device)
        self.pace.begin(time.perf_counter() - clock, self.asked.max_new_tokens)
        self.write([[] for _ in prompts], none, verdict, own)
        if self.drafter is not None and not all(self.done):
            self.refuse_the_pair()  # some caches know what they cannot do only once they hold something
            self.drafter.begin(ids, valid, self.last, hidden)
            if self.pace.sure and hasattr(self.drafter, "read"):
                self.drafter.read()
            _sync(self.device)
        self.out.prefill_seconds = time.perf_counter() - clock

    def to_the_end(self) -> None:
        while not all(self.done):
            if any(self.done) and self.can_select:
                self.drop()
            self.round()

    def round(self) -> None:
        out, asked, drafter = self.out, self.asked, self.drafter
        texts = [out.tokens[row] for row in self.rows]
        room = [0 if done else asked.max_new_tokens - len(text) - 1 for done, text in zip(self.done, texts, strict=True)]
        self.noise.next_round(texts)
        clock = time.perf_counter()
        k, evidence = self.choose()
        k = min(k, max(room))
        proposal = proposed(drafter, k, asked.how, self.noise.draft, len(self.rows), asked.rows, self.device)
        drafts, n = proposal.tokens.tolist(), [min(one, here) for one, here in zip(proposal.n.tolist(), room, strict=True)]
        _sync(self.device)
        draft_seconds = time.perf_counter() - clock

        clock = time.perf_counter()
        logits, hidden = self.call(proposal, n)
        verdict, own = self.decide(logits, proposal, drafts, n)
        accepted = verdict.accepted.tolist()
        refused = [0 if done else had - kept for done, had, kept in zip(self.done, n, accepted, strict=True)]
        self.lm.forget(refused)
        _sync(self.device)
        target_seconds = time.perf_counter() - clock

        was_done = list(self.done)
        self.write(drafts, n, verdict, own)
        clock = time.perf_counter()
        if not all(self.done):
            # A row that has ended is told of an ordinary token, so a drafter needs no notion of ended rows.
            last, stayed = verdict.next, verdict.accepted
            if any(self.done):
                ended = torch.tensor(self.done, device=self.device)
                last, stayed = torch.where(ended, self.last, last), stayed.masked_fill(ended, 0)
            self.last = last
            if drafter is not None:
                drafter.observe(Outcome(stayed, self.last, hidden))
                _sync(self.device)
        draft_seconds += time.perf_counter() - clock
        out.draft_seconds += draft_seconds
        out.target_seconds += target_seconds
        live = [slot for slot, done in enumerate(was_done) if not done]
        n, accepted, evidence = ([values[slot] for slot in live] for values in (n, accepted, evidence))
        self.pace.observe(Round(k, proposal.tokens.shape[1] + 1, n, accepted, evidence, draft_seconds, target_seconds))

    def choose(self) -> tuple[int, list[int]]:
        """How many tokens to draft, and what each row's proposal will rest on."""
        ways = [[A_MODEL] * len(self.rows)] if self.pace.sure else _ways(self.drafter, len(self.rows))
        live = [[one for one, done in zip(way, self.done, strict=True) if not done] for way in ways]
        pace: Any = self.pace
        k, way = pace.choose(live) if len(ways) > 1 and hasattr(pace, "choose") else (pace.next(live[0]), 0)
        if way:
            self.drafter.choose(way)
        return k, ways[way]

    def call(self, proposal: Proposal, n: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One forward of the target over each row's last token and drafts: logits [B, K+1, V], hidden states."""
        fed = torch.cat([self.last[:, None], proposal.tokens], dim=1)  # [B, K+1]
        exists = None
        if min(n) + 1 < fed.shape[1] or any(self.done):
            counts = torch.tensor([-1 if done else count for done, count in zip(self.done, n, strict=True)], device=self.device)
            exists = torch.arange(fed.shape[1], device=self.device) <= counts[:, None]
        return self.lm.extend(fed, exists, self.layers)

    def decide(
        self, logits: Tensor, proposal: Proposal, drafts: list[list[int]], n: list[int]
    ) -> tuple[Verdict, list[list[float]] | None]:
        """The verdict on the first n[b] drafts of each row, and the log-probabilities of what it leaves, if asked for."""
        how, n_draft = self.asked.how, torch.tensor(n, device=self.device)
        logits = self.scores.real(logits)
        texts = [self.out.tokens[row] for row in self.rows]
        shown = self.scores(logits, texts, drafts, [-1 if done else count for done, count in zip(self.done, n, strict=True)])
        if how.temperature == 0:
            verdict = verify_greedy(shown, proposal.tokens, n_draft)
        else:
            rule = VERIFY[self.asked.verify]
            verdict = rule(to_probs(shown, how), proposal.probs, proposal.tokens, n_draft, self.noise.verify)
        return verdict, own_logprobs(logits, proposal.tokens, verdict) if self.out.logprobs is not None else None

    def write(self, drafts: list[list[int]], n: list[int], verdict: Verdict, own: list[list[float]] | None) -> None:
        """Every row that goes on gets what it won."""
        accepted, following = verdict.accepted.tolist(), verdict.next.tolist()
        for slot, row in enumerate(self.rows):
            if not self.done[slot]:
                kept = drafts[slot][: accepted[slot]]
                self.keep(slot, row, kept, following[slot], n[slot], own[slot] if own is not None else None)
        self.scores.keep(accepted)

    def keep(self, slot: int, row: int, drafted: list[int], following: int, n: int, own: list[float] | None) -> None:
        """Append what a row won, cut where it ends."""
        out, asked = self.out, self.asked
        won, text = [*drafted, following], out.tokens[row]
        end = next((i for i, token in enumerate(won) if token in asked.ends), len(won))
        reason = "eos" if end < len(won) else None
        stop = self.stops[slot].first(won[: end + 1], asked.min_new_tokens) if self.stops is not None else None
        if stop is not None and stop[0] < end:
            end, reason = stop[0], f"stop: {stop[1]}"
        won = won[: end + 1]
        text += won
        cut = reason is not None and len(won) <= len(drafted)
        out.rounds[row].append((len(won) - 1 if cut else n, len(won) - 1))
        if own is not None and out.logprobs is not None:
            out.logprobs[row] += own[: len(won)]
        if reason is not None:
            out.ends[row] = reason
        self.done[slot] = reason is not None or len(text) >= asked.max_new_tokens
        if self.on_tokens is not None:
            self.on_tokens(Written(row, won, min(len(won), len(drafted))))

    def drop(self) -> None:
        """Finished rows leave the caches, so that nothing is computed for them any more."""
        left = [slot for slot, done in enumerate(self.done) if not done]
        index = torch.tensor(left, device=self.device)
        self.lm.select(index)
        if self.drafter is not None:
            self.drafter.select(index)
        self.noise.select(left)
        self.scores.select(left)
        if self.stops is not None:
            self.stops = [self.stops[slot] for slot in left]
        self.last, self.rows, self.done = self.last[index], [self.rows[slot] for slot in left], [False] * len(left)


def _columns(prompts: list[list[int]], asked: Settings, drafting: bool) -> int:
    """How many cache columns a call can need. A round leaves as many as its luckiest row won, so in the worst case rows take turns."""
    steps = max(asked.max_new_tokens - 1, 0)
    return max(map(len, prompts)) + (steps * len(prompts) if drafting else steps)


def _ways(drafter: Any, rows: int) -> list[list[int]]:
    """What each row's drafter can rest on, in each way that it has; one that does not say is taken for a model."""
    if hasattr(drafter, "ways"):
        return drafter.ways()
    return [drafter.evidence() if hasattr(drafter, "evidence") else [A_MODEL] * rows]


def _pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, T], valid [B, T])."""
    widest = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), widest, dtype=torch.long)
    valid = torch.zeros(len(prompts), widest, dtype=torch.bool)
    for b, prompt in enumerate(prompts):
        ids[b, widest - len(prompt) :] = torch.tensor(prompt)
        valid[b, widest - len(prompt) :] = True
    return ids.to(device), valid.to(device)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
