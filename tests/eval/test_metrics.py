"""Figures by hand: pooled over tokens, conditional by position, intervals over prompts, one ruler for both arms."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftsmith.eval import Measurement, metrics
from draftsmith.eval.chosen import chosen_elsewhere
from draftsmith.eval.prompts import sample, together
from draftsmith.recipes import Prompt
from made_reports import an_answer


def measured(prompt: str, rounds: list[tuple[int, int]], **more: Any) -> Measurement:
    return an_answer(rounds, prompt=prompt, **more)


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


def test_an_interval_draws_whole_prompts_and_both_sides_of_a_ratio_together() -> None:
    assert metrics.interval([(1.0, 2.0)] * 2, 100) == (0.5, None, None)
    same = metrics.interval([(one, 2 * one) for one in (1.0, 5.0, 9.0)], 100)
    assert same == pytest.approx((0.5, 0.5, 0.5))
    value, low, high = metrics.interval([(0.0, 1.0)] * 50 + [(1.0, 1.0)] * 50, 4000)
    assert value == 0.5
    assert low == pytest.approx(0.5 - 1.96 * 0.05, abs=0.012)  # of a share of 100
    assert high == pytest.approx(0.5 + 1.96 * 0.05, abs=0.012)
    assert metrics.interval([(0.0, 1.0), (1.0, 1.0), (0.0, 1.0)], 500, 3) == metrics.interval(
        [(0.0, 1.0), (1.0, 1.0), (0.0, 1.0)], 500, 3
    )
    rare = metrics.interval([(1.0, 1.0), (0.0, 0.0), (0.0, 0.0)], 500)  # a resample without the first has nothing to divide by
    assert rare == (1.0, 1.0, 1.0)


def test_rows_of_a_batch_are_one_unit() -> None:
    rows = [measured(f"p{i}", [(3, 1)], seconds=1.0, baseline_seconds=1.0 + (i // 2 % 2)) for i in range(8)]
    grouped = [dataclasses.replace(one, group=f"g{i // 4}") for i, one in enumerate(rows)]
    assert metrics.speed_up(rows, 200).low is not None
    assert metrics.speed_up(grouped, 200) == (1.5, None, None)  # two units are no interval


def test_one_arm_against_another_is_paired_on_common_prompts() -> None:
    ours = [measured(f"p{i}", [(3, 1)], seconds=(1 + i) / 2) for i in range(6)]
    theirs = [measured(f"p{i}", [(3, 1)], seconds=1 + i) for i in range(1, 7)]
    assert metrics.against(ours, theirs, 200) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="two arms without a common prompt: measure them in one run"):
        metrics.against(ours[:1], theirs[-1:], 200)


def test_the_histogram_counts_calls_that_had_drafts() -> None:
    assert metrics.histogram([measured("x", ROUNDS), measured("y", [(3, 0)])]) == [2, 1, 1, 1]
    assert metrics.histogram([measured("x", [(0, 0)])]) == []


def test_tau_is_of_the_rounds_behind_the_prefill_with_and_without_the_targets_own_token() -> None:
    some = [measured("x", [(0, 0), (3, 3), (3, 0)]), measured("y", [(0, 0), (3, 1)])]
    one = metrics.summary(some, 50, bytes_share=0.1)
    assert one["tau"] == {"value": 7 / 3, "low": None, "high": None}
    assert one["tau_without_bonus"] == 4 / 3
    assert one["drafts"] == 3
    assert one["mbsu"] == pytest.approx((7 / 3) / (1 + 3 * 0.1))
    bare = metrics.summary([measured("x", [(0, 0)])], 50, bytes_share=0.1)
    assert (bare["tau"], bare["tau_without_bonus"], bare["mbsu"], bare["per_token_ms"]) == (None, None, None, None)


def test_latencies_are_by_the_clock_on_the_wall_and_memory_is_the_worst_call() -> None:
    one = dataclasses.replace(
        measured("x", [(0, 0), (3, 3)]), first_seconds=0.2, last_seconds=1.0, baseline_first_seconds=0.1, baseline_last_seconds=1.7, peak_bytes=5,
    )  # fmt: skip
    other = dataclasses.replace(measured("y", [(0, 0)]), first_seconds=0.4, last_seconds=0.4, peak_bytes=3, limited=1)
    found = metrics.summary([one, other], 50)
    assert found["first_token_ms"] == pytest.approx(300)
    assert found["per_token_ms"] == pytest.approx(800 / 4)  # pooled: an answer of one token has no token behind its first
    assert found["answer_ms"] == pytest.approx(700)
    assert found["baseline_answer_ms"] == pytest.approx(850)
    assert (found["peak_bytes"], found["limited"]) == (5, 1)


def test_a_batch_is_filled_kind_by_kind_with_prompts_of_as_many_turns() -> None:
    prompts = [Prompt(f"{kind}{i}", kind, [], ["x"] * (2 if i == 2 else 1)) for i in range(3) for kind in "ab"]
    assert [[one.id for one in group] for group in together(prompts, 3)] == [["a0", "a1", "b0"], ["b1"], ["a2", "b2"]]
    assert together(prompts, 1) == [[one] for one in prompts]
    with pytest.raises(ValueError, match="a batch of 5 asked; there are 6 prompts, and at most 4 of as many turns: take more"):
        together(prompts, 5)


def test_the_settings_of_a_choice_are_judged_on_other_prompts() -> None:
    fast = [measured(f"p{i}", [(3, 1)], seconds=(0.5 if i == 0 else 1.1)) for i in range(4)]
    even = [measured(f"p{i}", [(3, 1)], seconds=1.0) for i in range(4)]
    taken = chosen_elsewhere({"fast": fast, "even": even})
    # On p0 alone `fast` shines; without it `even` is chosen there, and `fast` on the others.
    assert [one.seconds for one in taken] == [1.0, 1.1, 1.1, 1.1]
    assert [one.seconds for one in chosen_elsewhere({"fast": fast[:1], "even": even[:1]})] == [0.5]
