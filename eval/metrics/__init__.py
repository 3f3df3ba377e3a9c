"""Figures from measurements, pooled over tokens, with intervals over prompts. Ratios keep both sides until the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from draftsmith.eval.bench import Measurement


class Interval(NamedTuple):
    """A ratio and its 95 % bootstrap interval with the prompt as the unit; the ends are None from fewer than 3 prompts."""

    value: float
    low: float | None
    high: float | None


def tokens_per_call(measured: Sequence[Measurement]) -> float:
    """Tokens emitted per call of the target, its own token included; plain decoding is 1. The prefill is not counted."""
    return sum(m.new_tokens for m in measured) / sum(len(m.accepted_lengths) for m in measured)


def accepted_per_drafted(measured: Sequence[Measurement]) -> float | None:
    drafted = sum(sum(m.drafted_lengths) for m in measured)
    return sum(sum(m.accepted_lengths) for m in measured) / drafted if drafted else None


def acceptance_by_position(measured: Sequence[Measurement]) -> list[tuple[int, int]]:
    """For each drafted position (accepted, tried): tried counts the calls in which every draft before it was accepted."""
    longest = max((max(m.drafted_lengths, default=0) for m in measured), default=0)
    counts = [[0, 0] for _ in range(longest)]
    for m in measured:
        for drafted, accepted in zip(m.drafted_lengths, m.accepted_lengths, strict=True):
            for place in range(min(accepted + 1, drafted)):
                counts[place][1] += 1
                counts[place][0] += place < accepted
    return [(accepted, tried) for accepted, tried in counts]


def speed_up(measured: Sequence[Measurement], resamples: int, seed: int = 0) -> Interval:
    """Tokens a second over plain decoding's on the same prompts, prefill included."""
    by_prompt: dict[str, list[float]] = {}
    for m in measured:
        sums = by_prompt.setdefault(m.prompt, [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((m.new_tokens, m.seconds, m.baseline_tokens, m.baseline_seconds)):
            sums[place] += value
    columns = tuple(np.array(list(by_prompt.values())).T)
    value = float(_ratio(*columns))
    if len(by_prompt) < 3:
        return Interval(value, None, None)
    drawn = stats.bootstrap(
        columns, _ratio, paired=True, vectorized=True, n_resamples=resamples, method="percentile", rng=np.random.default_rng(seed)
    )
    return Interval(value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high))


def _ratio(tokens: Any, seconds: Any, baseline_tokens: Any, baseline_seconds: Any, axis: int = -1) -> Any:
    return (tokens.sum(axis) / seconds.sum(axis)) / (baseline_tokens.sum(axis) / baseline_seconds.sum(axis))


def summary(measured: Sequence[Measurement], resamples: int, seed: int = 0) -> dict[str, Any]:
    """All figures of one candidate on one set of answers, ready for json."""
    calls = sum(len(m.accepted_lengths) for m in measured)
    drafted = sum(sum(m.drafted_lengths) for m in measured)
    return {
        "answers": len(measured), "prompts": len({m.prompt for m in measured}), "new_tokens": sum(m.new_tokens for m in measured),
        "target_calls": calls, "drafted": drafted, "accepted": sum(sum(m.accepted_lengths) for m in measured),
        "tokens_per_call": tokens_per_call(measured), "accepted_per_drafted": accepted_per_drafted(measured),
        "acceptance_by_position": acceptance_by_position(measured),
        "speed_up": speed_up(measured, resamples, seed)._asdict(),
        "equal": sum(m.equal for m in measured), "compared": sum(m.compared for m in measured),
        "gaps": sorted((gap for m in measured for gap in m.gaps), reverse=True),
        "draft_ms": sum(m.draft_ms * sum(m.drafted_lengths) for m in measured) / max(drafted, 1),
        "target_ms": sum(m.target_ms * len(m.accepted_lengths) for m in measured) / calls,
        "baseline_ms": sum(m.baseline_ms * m.baseline_tokens for m in measured) / sum(m.baseline_tokens for m in measured),
    }  # fmt: skip
