"""Figures by hand: pooled over tokens, conditional by position, intervals over prompts, one ruler for both arms."""

from __future__ import annotations

import pytest

from draftsmith.eval import Measurement, metrics
from draftsmith.eval.prompts import sample
from draftsmith.recipes import Prompt


def measured(
    prompt: str, rounds: list[tuple[int, int]], seconds: float = 1.0, baseline_seconds: float = 1.0, category: str = "a"
) -> Measurement:
    new = sum(accepted + 1 for _, accepted in rounds)
    return Measurement(
        drafter="d", k=3, temperature=0.0, batch=1, category=category, prompt=prompt, new_tokens=new, seconds=seconds, baseline_tokens=new,
        baseline_seconds=baseline_seconds, accepted_lengths=tuple(a for _, a in rounds), drafted_lengths=tuple(d for d, _ in rounds), equal=1,
        compared=1, gaps=(), draft_ms=2.0, target_ms=10.0, baseline_ms=8.0,
    )  # fmt: skip


ROUNDS = [(3, 3), (3, 0), (3, 1), (2, 2), (0, 0)]


def test_tokens_per_call_is_pooled_not_a_mean_of_ratios() -> None:
    assert metrics.tokens_per_call([measured("x", ROUNDS)]) == 11 / 5
    long, short = measured("x", [(3, 3)] * 9), measured("y", [(3, 0)])
    assert metrics.tokens_per_call([long, short]) == 37 / 10


def test_acceptance_by_position_is_conditional_and_a_short_draft_is_no_refusal() -> None:
    assert metrics.acceptance_by_position([measured("x", ROUNDS)]) == [(3, 4), (2, 3), (1, 1)]
    assert metrics.accepted_per_drafted([measured("x", ROUNDS)]) == 6 / 11
    assert metrics.accepted_per_drafted([measured("x", [(0, 0)])]) is None
    assert metrics.acceptance_by_position([measured("x", [(0, 0)])]) == []


def test_speed_up_is_a_ratio_of_sums_with_a_paired_interval_over_prompts() -> None:
    some = [measured(f"p{i}", [(3, i % 4)], seconds=1.0 + i / 10, baseline_seconds=2 * (1.0 + i / 10)) for i in range(10)]
    value, low, high = metrics.speed_up(some, 300)
    assert value == pytest.approx(2.0)
    assert low == pytest.approx(2.0), "every prompt is twice as fast: paired, nothing varies"
    assert high == pytest.approx(2.0)
    mixed = [measured(f"p{i}", [(3, 1)], seconds=1.0, baseline_seconds=1.0 + (i % 2)) for i in range(10)]
    value, low, high = metrics.speed_up(mixed, 300)
    assert value == pytest.approx(1.5)
    assert low is not None
    assert high is not None
    assert low < 1.5 < high
    assert metrics.speed_up(mixed[:2], 300).low is None


def test_speed_up_counts_the_tokens_that_each_arm_wrote() -> None:
    one = measured("x", [(3, 3)], seconds=1.0, baseline_seconds=1.0)
    half = Measurement(**{**one.__dict__, "baseline_tokens": 2})
    assert metrics.speed_up([half], 10).value == pytest.approx(2.0)


def test_a_summary_keeps_both_sides_of_every_ratio() -> None:
    one = metrics.summary([measured("x", ROUNDS), measured("y", [(3, 0)])], 50)
    assert (one["answers"], one["prompts"], one["new_tokens"], one["target_calls"], one["drafted"], one["accepted"]) == (
        2,
        2,
        12,
        6,
        14,
        6,
    )
    assert (one["equal"], one["compared"]) == (2, 2)
    assert one["draft_ms"] == pytest.approx(2.0)
    assert one["baseline_ms"] == pytest.approx(8.0)


def test_a_sample_takes_the_first_of_each_kind() -> None:
    prompts = [Prompt(f"{kind}{i}", kind, [], ["x"]) for i in range(3) for kind in "ab"]
    assert [prompt.id for prompt in sample(prompts, 1)] == ["a0", "b0"]
    assert sample(prompts, 0) == prompts
