"""Figures from measurements, pooled over tokens, with intervals over prompts. Ratios keep both sides until the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from draftsmith.eval.measurement import Measurement
from draftsmith.eval.metrics.intervals import Interval, interval

__all__ = [
    "Interval", "acceptance_by_position", "accepted_per_drafted", "against", "histogram", "interval", "speed_up", "summary", "tokens_per_call",
]  # fmt: skip

Sums = Callable[[Measurement], tuple[float, ...]]


def tokens_per_call(measured: Sequence[Measurement]) -> float:
    """Tokens emitted per call of the target, its own token and the prefill included; plain decoding is 1."""
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


def histogram(measured: Sequence[Measurement]) -> list[int]:
    """How many calls that had drafts accepted 0, 1, 2 ... of them."""
    found = Counter(
        accepted for m in measured for drafted, accepted in zip(m.drafted_lengths, m.accepted_lengths, strict=True) if drafted
    )
    return [found[length] for length in range(max(found, default=-1) + 1)]


def by_unit(measured: Sequence[Measurement], sums: Sums) -> dict[str, tuple[float, ...]]:
    """`sums` of each measurement, added up over those that share a unit."""
    units: dict[str, tuple[float, ...]] = {}
    for m in measured:
        these = sums(m)
        units[m.unit] = tuple(a + b for a, b in zip(units.get(m.unit, (0.0,) * len(these)), these, strict=True))
    return units


def speed_up(measured: Sequence[Measurement], resamples: int, seed: int = 0) -> Interval:
    """Tokens a second over plain decoding's on the same prompts, prefill included."""
    sums = by_unit(measured, lambda m: (m.new_tokens, m.seconds, m.baseline_tokens, m.baseline_seconds))
    return interval(sums.values(), resamples, seed)


def against(ours: Sequence[Measurement], theirs: Sequence[Measurement], resamples: int, seed: int = 0) -> Interval:
    """Tokens a second of one arm over another's, on the prompts that both answered, which are drawn together."""
    a, b = (by_unit(some, lambda m: (m.new_tokens, m.seconds)) for some in (ours, theirs))
    both = [(*a[unit], *b[unit]) for unit in a if unit in b]
    if not both:
        raise ValueError("two arms without a common prompt: measure them in one run, on the same prompts, to compare them")
    return interval(both, resamples, seed)


def summary(measured: Sequence[Measurement], resamples: int, seed: int = 0, bytes_share: float | None = None) -> dict[str, Any]:
    """All figures of one candidate on one set of answers, ready for json; `bytes_share` is c_P, the draft's bytes over the target's."""
    calls = sum(len(m.accepted_lengths) for m in measured)
    rounds = calls - len(measured)  # behind the prefills
    drafted, accepted = (sum(sum(lengths) for lengths in each) for each in _lengths(measured))
    drafts = sum(one > 0 for m in measured for one in m.drafted_lengths)
    new = sum(m.new_tokens for m in measured)
    tau = (new - len(measured)) / rounds if rounds else None
    return {
        "answers": len(measured), "prompts": len({m.prompt for m in measured}), "new_tokens": new, "target_calls": calls,
        "drafts": drafts, "drafted": drafted, "accepted": accepted, "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "tokens_per_call": tokens_per_call(measured), "accepted_per_drafted": accepted_per_drafted(measured),
        "tau": None if tau is None else _interval(measured, lambda m: (m.new_tokens - 1, len(m.accepted_lengths) - 1), resamples, seed),
        "tau_without_bonus": accepted / rounds if rounds else None,
        "acceptance_by_position": acceptance_by_position(measured), "histogram": histogram(measured),
        "mbsu": None if tau is None or bytes_share is None else tau / (1 + drafted / rounds * bytes_share),
        "speed_up": speed_up(measured, resamples, seed)._asdict(),
        "equal": sum(m.equal for m in measured), "compared": sum(m.compared for m in measured),
        "gaps": sorted((gap for m in measured for gap in m.gaps), reverse=True),
        **milliseconds(measured), **latencies(measured),
        "peak_bytes": max(m.peak_bytes for m in measured), "baseline_peak_bytes": max(m.baseline_peak_bytes for m in measured),
        "limited": sum(m.limited for m in measured),
    }  # fmt: skip


def milliseconds(measured: Sequence[Measurement]) -> dict[str, float | None]:
    """A drafted token, what looking in vain took included; a verifying call and plain decoding's, behind the prefills. None of none."""

    def pooled(what: str, each: list[int]) -> float | None:
        return sum(getattr(m, what) * n for m, n in zip(measured, each, strict=True)) / sum(each) if sum(each) else None

    drafted = sum(sum(m.drafted_lengths) for m in measured)
    drafting = sum(1000 * m.draft_seconds or m.draft_ms * sum(m.drafted_lengths) for m in measured)
    return {
        "draft_ms": drafting / drafted if drafted else None,
        "target_ms": pooled("target_ms", [len(m.accepted_lengths) - 1 for m in measured]),
        "baseline_ms": pooled("baseline_ms", [m.baseline_tokens - 1 for m in measured]),
    }


def latencies(measured: Sequence[Measurement]) -> dict[str, float | None]:
    """What a client waits for, in ms: the first token, each token behind it, the whole answer; means, plain decoding's beside ours."""

    def waited(first: list[float], last: list[float], tokens: list[int]) -> tuple[float, float | None, float]:
        behind = sum(tokens) - len(tokens)
        between = 1000 * (sum(last) - sum(first)) / behind if behind else None
        return 1000 * sum(first) / len(first), between, 1000 * sum(last) / len(last)

    ours = waited([m.first_seconds for m in measured], [m.last_seconds for m in measured], [m.new_tokens for m in measured])
    theirs = waited(
        [m.baseline_first_seconds for m in measured],
        [m.baseline_last_seconds for m in measured],
        [m.baseline_tokens for m in measured],
    )
    names = ("first_token_ms", "per_token_ms", "answer_ms")
    return dict(zip(names, ours, strict=True)) | {f"baseline_{name}": ms for name, ms in zip(names, theirs, strict=True)}


def _lengths(measured: Sequence[Measurement]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [m.drafted_lengths for m in measured], [m.accepted_lengths for m in measured]


def _interval(measured: Sequence[Measurement], sums: Sums, resamples: int, seed: int) -> dict[str, float | None]:
    return interval(by_unit(measured, sums).values(), resamples, seed)._asdict()
