"""From chances and costs to a speed-up: the decoder's rounds are a renewal process along the text, so nothing is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftsmith.eval.prediction.chances import Chances
from draftsmith.eval.prediction.costs import Cost


class Answer(NamedTuple):
    """One answer of plain decoding: its tokens, its clocks in seconds, and the chances of each drafter along it."""

    tokens: int
    prefill_seconds: float
    seconds: float
    chances: dict[str, Chances]


class Rounds(NamedTuple):
    """Expected rounds behind the prefill, and at each drafted position how many drafts are tried and how many stay."""

    calls: float
    tried: list[float]
    accepted: list[float]


class Prediction(NamedTuple):
    """One setting. `speed_up` is of whole answers, as measured; `decoding` of the rounds alone, S = tau / (k c + r + o)."""

    alpha: float  # mean chance that a draft stays, of first drafts behind every token
    tau: float  # tokens a round
    tokens_per_call: float  # the prefill and its token included
    by_position: list[float | None]  # given that all drafts before it stayed
    cost: Cost
    decoding: float
    speed_up: float


def rounds(chances: Chances, k: int) -> Rounds:
    """The rounds that write this very text with blocks of `k`: its first token is the prefill's, its last is never a draft.

    A round from t keeps i drafts with chance (1 - a_i) prod_{j<i} a_j and goes on behind the target's own token; the sum over
    all ways to cut the text into rounds is taken forwards, once.
    """
    table = np.asarray(chances, dtype=np.float64)
    n = len(table)
    begins = np.zeros(n + 1)  # how often a round begins behind so many tokens
    begins[min(1, n)] = 1.0
    tried, accepted = np.zeros(k), np.zeros(k)
    for t in range(1, n):
        reaches, block = begins[t], min(k, n - 1 - t)
        for i in range(block):
            stays = reaches * (table[t + i] if table.ndim == 1 else table[t, i])
            tried[i] += reaches
            accepted[i] += stays
            begins[t + i + 1] += reaches - stays
            reaches = stays
        begins[t + block + 1] += reaches
    return Rounds(float(begins[1:n].sum()), tried.tolist(), accepted.tolist())


def predict(answers: Sequence[Answer], drafter: str, k: int, cost: Cost) -> Prediction:
    """The setting on these answers, pooled over tokens, as the measured figures are."""
    every = [rounds(one.chances[drafter], k) for one in answers]
    calls, tokens = sum(one.calls for one in every), sum(one.tokens for one in answers)
    tried, accepted = (np.sum([getattr(one, name) for one in every], axis=0) for name in ("tried", "accepted"))
    tau = (tokens - len(answers)) / calls if calls else 1.0
    decoding = tau / (k * cost.c + cost.r + cost.o)
    read = sum(one.prefill_seconds for one in answers) / sum(one.seconds for one in answers)
    first = np.concatenate([np.asarray(one.chances[drafter], dtype=np.float64).reshape(one.tokens, -1)[1:, 0] for one in answers])
    return Prediction(
        alpha=float(first.mean()) if len(first) else 0.0, tau=tau, tokens_per_call=tokens / (calls + len(answers)),
        by_position=[float(kept / all_) if all_ > 0 else None for kept, all_ in zip(accepted, tried, strict=True)],
        cost=cost, decoding=decoding, speed_up=1 / (read * cost.prefill + (1 - read) / decoding),
    )  # fmt: skip
