"""Draft, verify, keep, repeat. Plain decoding is this same loop without a drafter, so the two are timed by one ruler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM, positions
from draftsmith.specdec.drafters.base import Drafter, Outcome, Proposal
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.noise import RowNoise
from draftsmith.specdec.pace import Fixed, Pace
from draftsmith.specdec.sampling import Sampling, to_probs
from draftsmith.specdec.verify import VERIFY


@dataclass
class Generation:
    """What was written, and what each call of the target brought.

    `rounds[b]` holds (drafted, accepted) of each target call of row b, and always
    `len(tokens[b]) == sum(accepted + 1)`: a round that ends in an EOS counts the EOS as the target's own token and the
    drafts behind it as never drafted, so neither acceptance nor its denominator sees tokens that cannot be emitted.
    """

    tokens: list[list[int]]
    rounds: list[list[tuple[int, int]]]
    finished: list[bool] = field(default_factory=list)  # did the row end with an EOS
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0  # the whole call, prefill and overhead included
    settings: dict[str, Any] = field(default_factory=dict)  # what was in force, whatever a generation_config says


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
    stop_strings: Sequence[str] = (),
    min_new_tokens: int = 0,
) -> Generation:
    """Continue `prompts` (lists of token ids) as the target alone would, with fewer sequential steps.

    At temperature 0 in fp32 the tokens are the target's own greedy ones; above it they follow the target's law under
    `how`. `k` tokens are drafted a round unless `pace` decides. `eos` ends a row and is kept. One `seed` serves all
    rows (each gets a stream of its own); a list gives every row its own, and its output then does not depend on its
    neighbours. A speculative and a plain run of one seed differ at temperature > 0 while their laws agree.
    """
    vocabulary = output_rows(target)
    ends = _check(target, prompts, vocabulary, k, max_new_tokens, eos, seed, verify, processors, stop_strings, min_new_tokens)
    started = time.perf_counter()
    batch = len(prompts)
    out = Generation([[] for _ in prompts], [[] for _ in prompts], [False] * batch)
    out.settings = {"k": k, "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "sampling": how, "seed": seed}
    out.settings |= {"eos": sorted(ends), "verify": verify, "pace": type(pace).__name__ if pace else "Fixed"}
    if max_new_tokens == 0:
        return out
    device = target.device
    pace = pace or Fixed(k if drafter is not None else 0)
    layers = drafter.hidden_layers if drafter is not None else ()
    noise = RowNoise(seed, batch, how.temperature > 0)
    lm = CachedLM(target, batch)
    lm.refuse_ahead(max(map(len, prompts)) + max_new_tokens)

    ids, valid, last = _pad_left(prompts, device)
    hidden: tuple[Tensor, ...] = tuple(torch.empty(batch, 0, lm.config.hidden_size, device=device) for _ in layers)
    if ids.shape[1]:
        _, hidden = lm.extend(ids, valid, layers, keep=1)
    if drafter is not None:
        if ids.shape[1] and (reason := lm.cannot_roll_back()):
            raise ValueError(reason)
        drafter.begin(ids, valid, last, hidden)
    _sync(device)
    out.prefill_seconds = time.perf_counter() - started

    alive = torch.ones(batch, dtype=torch.bool, device=device)
    while bool(alive.any()):
        written = torch.tensor([len(row) for row in out.tokens], device=device)
        room = torch.where(alive, max_new_tokens - written - 1, 0)  # drafts that can be emitted beside the target's token
        noise.next_round(out.tokens)
        clock = time.perf_counter()
        proposal = _propose(drafter, min(pace.next(), int(room.max())), how, noise, batch, vocabulary, device)
        n_draft = torch.minimum(proposal.n, room)
        _sync(device)
        draft_seconds = time.perf_counter() - clock

        clock = time.perf_counter()
        k_now = proposal.tokens.shape[1]
        fed = torch.cat([last[:, None], proposal.tokens], dim=1)  # [B, K+1]
        exists = alive[:, None] & (torch.arange(k_now + 1, device=device) <= n_draft[:, None])
        logits, hidden = lm.extend(fed, exists, layers)
        p = to_probs(_without_early_end(logits, ends, min_new_tokens, written), how)  # [B, K+1, V]
        verdict = VERIFY[verify](p, proposal.probs, proposal.tokens, n_draft, noise.verify)
        lm.forget(torch.where(alive, n_draft - verdict.accepted, 0))
        _sync(device)
        target_seconds = time.perf_counter() - clock

        last = torch.where(alive, verdict.next, last)
        alive = _keep(
            out,
            fed[:, 1:].tolist(),
            n_draft.tolist(),
            verdict.accepted.tolist(),
            verdict.next.tolist(),
            alive,
            ends,
            max_new_tokens,
        )
        clock = time.perf_counter()
        if drafter is not None and bool(alive.any()):
            # A row that has ended is told of an ordinary token, so a drafter needs no notion of ended rows.
            drafter.observe(Outcome(torch.where(alive, verdict.accepted, 0), last, hidden))
            _sync(device)
        draft_seconds += time.perf_counter() - clock
        out.draft_seconds += draft_seconds
        out.target_seconds += target_seconds
        pace.observe(int(n_draft.sum()), int(verdict.accepted.sum()), draft_seconds, target_seconds)
    out.seconds = time.perf_counter() - started
    return out


def _propose(
    drafter: Drafter | None, k: int, how: Sampling, noise: RowNoise, batch: int, vocabulary: int, device: torch.device
) -> Proposal:
    if drafter is None:
        nothing = torch.empty(batch, 0, dtype=torch.long, device=device)
        return Proposal(nothing, None, torch.zeros(batch, dtype=torch.long, device=device))
    tokens, probs, n = drafter.propose(k, how, noise.draft)
    tokens, n = tokens.to(device), n.to(device)
    widest = int(n.max()) if tokens.shape[1] else 0
    tokens = tokens[:, :widest]
    if bool((tokens >= vocabulary).any()) or bool((tokens < 0).any()):
        raise ValueError(f"{type(drafter).__name__} proposed id {int(tokens.max())}; the target has ids 0..{vocabulary - 1}")
    if probs is not None:
        probs = probs[:, :widest].to(device)
        short = vocabulary - probs.shape[-1]
        if short < 0:
            raise ValueError(
                f"{type(drafter).__name__} spreads its law over {probs.shape[-1]} ids, the target has {vocabulary}: mask the "
                "rest before the softmax, e.g. ModelDrafter(model, vocab_size=...)"
            )
        probs = torch.nn.functional.pad(probs, (0, short))  # the draft never says those ids: q = 0 there
    return Proposal(tokens, probs, n)


def _keep(
    out: Generation,
    drafts: list[list[int]],
    n_draft: list[int],
    accepted: list[int],
    following: list[int],
    alive: Tensor,
    ends: frozenset[int],
    limit: int,
) -> Tensor:
    """Append what each live row won, cut at its first EOS; which rows go on: [B]."""
    goes_on = alive.tolist()
    for b, row in enumerate(out.tokens):
        if not goes_on[b]:
            continue
        won = [*drafts[b][: accepted[b]], following[b]]
        end = next((i for i, token in enumerate(won) if token in ends), None)
        if end is not None:
            won = won[: end + 1]
            out.finished[b] = True
        row += won
        cut = end is not None and end < accepted[b]
        out.rounds[b].append((len(won) - 1 if cut else n_draft[b], len(won) - 1))
        goes_on[b] = end is None and len(row) < limit
    return torch.tensor(goes_on, device=alive.device)


def _without_early_end(logits: Tensor, ends: frozenset[int], least: int, written: Tensor) -> Tensor:
    """EOS is impossible while a row has fewer than `least` tokens; column j stands behind j drafted ones."""
    if not least or not ends:
        return logits
    place = written[:, None] + torch.arange(logits.shape[1], device=logits.device)
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    banned[sorted(ends)] = True
    return logits.masked_fill((place < least)[..., None] & banned, -torch.inf)


def _pad_left(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [B, T], valid [B, T], last [B]): every prompt without its last token, and that token."""
    widest = max(len(prompt) for prompt in prompts) - 1
    ids = torch.zeros(len(prompts), widest, dtype=torch.long)
    valid = torch.zeros(len(prompts), widest, dtype=torch.bool)
    for b, prompt in enumerate(prompts):
        if len(prompt) > 1:
            ids[b, widest - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
            valid[b, widest - len(prompt) + 1 :] = True
    return ids.to(device), valid.to(device), torch.tensor([prompt[-1] for prompt in prompts], device=device)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check(
    target: PreTrainedModel, prompts: list[list[int]], vocabulary: int, k: int, max_new_tokens: int, eos: Iterable[int] | int | None,
    seed: int | Sequence[int], verify: str, processors: Sequence[Any], stop_strings: Sequence[str], min_new_tokens: int,
) -> frozenset[int]:  # fmt: skip
    if not prompts:
        raise ValueError("no prompts: generate needs at least one list of token ids")
    for b, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {b} is empty: a model needs at least one token to continue (its BOS, say)")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ValueError(f"prompt {b} holds ids {min(prompt)}..{max(prompt)}, the target has ids 0..{vocabulary - 1}")
    if k < 0 or max_new_tokens < 0 or not 0 <= min_new_tokens <= max(max_new_tokens, 0):
        raise ValueError(
            f"k={k} and max_new_tokens={max_new_tokens} must be >= 0, min_new_tokens={min_new_tokens} within max_new_tokens"
        )
    longest, limit = max(map(len, prompts)) + max(max_new_tokens - 1, 0), positions(target.config.get_text_config())
    if limit and longest > limit:  # the last token written is never fed
        raise ValueError(
            f"prompt and new tokens need {longest} positions, {type(target).__name__} serves {limit} here: ask for fewer"
        )
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r} is not one of {sorted(VERIFY)}")
    if not isinstance(seed, int) and len(seed) != len(prompts):
        raise ValueError(f"one seed a row: {len(prompts)} prompts, found {len(seed)} seeds")
    if len(processors) or len(stop_strings):
        raise ValueError("logits processors and stop strings are not served under speculation yet; use eos and min_new_tokens")
    ends = frozenset([eos] if isinstance(eos, int) else eos or ())
    if any(not 0 <= one < vocabulary for one in ends):
        raise ValueError(f"eos {sorted(ends)} must be ids of the target, 0..{vocabulary - 1}")
    return ends
