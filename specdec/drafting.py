"""What the loop asks of a drafter: held to its contract, and of its extras asked only for those it has."""

from __future__ import annotations

from typing import Any

import torch

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Drafter, Proposal
from draftsmith.specdec.pace import A_MODEL
from draftsmith.specdec.sampling import Generator, Sampling
from draftsmith.specdec.split import SplitLM


def refuse_pair(lm: CachedLM | SplitLM, drafter: Any, rows: int) -> None:
    """ValueError where this drafter cannot serve the target in `lm`, whose head says `rows` ids, whatever the text."""
    if reason := lm.cannot_roll_back():
        raise ValueError(reason)
    if (says := getattr(drafter, "ids", 0)) > rows:
        raise ValueError(
            f"the draft says ids 0..{says - 1}, the target has 0..{rows - 1}: give the drafter vocab_size={rows}, so that the rest "
            "is masked before the softmax"
        )


def choose(pace: Any, drafter: Any, slots: int, going: list[int]) -> tuple[int, list[int]]:
    """How many tokens to draft over `slots` rows, and what the proposal of each of those that are `going` on will rest on."""
    ways = [[A_MODEL] * slots] if pace.sure else _ways(drafter, slots)
    ways = [[way[slot] for slot in going] for way in ways]
    k, way = pace.choose(ways) if len(ways) > 1 and hasattr(pace, "choose") else (pace.next(ways[0]), 0)
    if way:
        drafter.choose(way)
    return k, ways[way]


def proposed(
    drafter: Drafter | None, k: int, how: Sampling, generator: Generator, rows: int, vocabulary: int, device: torch.device
) -> Proposal:
    """The drafter's proposal on the target's device, no wider than its widest row, its law over the target's `vocabulary` ids.

    Without a drafter, an empty one. ValueError for a proposal that cannot be verified without a change of the law.
    """
    if drafter is None:
        nothing = torch.empty(rows, 0, dtype=torch.long, device=device)
        return Proposal(nothing, None, torch.zeros(rows, dtype=torch.long, device=device))
    tokens, probs, n, parents = drafter.propose(k, how, generator)
    who = type(drafter).__name__
    if parents is not None:
        raise ValueError(f"{who} proposes a tree of candidates; only chains are verified here")
    tokens, n = tokens.to(device), n.to(device)
    width, counts = tokens.shape[1] if tokens.dim() == 2 else -1, n.tolist()
    if tokens.shape != (rows, width) or n.shape != (rows,) or not 0 <= min(counts) <= max(counts) <= width:
        raise ValueError(f"{who} must propose tokens [{rows}, K] and n [{rows}] in 0..K, found {list(tokens.shape)} and {counts}")
    widest = max(counts)
    tokens = tokens[:, :widest]
    if min(counts) < widest:  # columns that do not count
        tokens = tokens.masked_fill(torch.arange(widest, device=device) >= n[:, None], 0)
    if widest:
        least, most = (int(one) for one in tokens.aminmax())
        if least < 0 or most >= vocabulary:
            raise ValueError(f"{who} proposed ids {least}..{most}; the target has 0..{vocabulary - 1}")
    if probs is None or how.temperature == 0:  # at temperature 0 a draft stays where it is the target's choice, whatever q was
        return Proposal(tokens, None, n)
    short = vocabulary - probs.shape[-1]
    if short < 0:
        raise ValueError(
            f"{who} spreads its law over {probs.shape[-1]} ids, the target has {vocabulary}: mask the rest before the softmax, "
            "e.g. ModelDrafter(model, vocab_size=...)"
        )
    # The draft never says those ids: q = 0 there.
    return Proposal(tokens, torch.nn.functional.pad(probs[:, :widest].to(device), (0, short)), n)


def _ways(drafter: Any, slots: int) -> list[list[int]]:
    """What each row's drafter can rest on, in each way that it has; one that does not say is taken for a model."""
    if hasattr(drafter, "ways"):
        return drafter.ways()
    return [drafter.evidence() if hasattr(drafter, "evidence") else [A_MODEL] * slots]
