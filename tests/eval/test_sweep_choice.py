"""One setting or none: what a sweep recommends, from made-up measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from draftsmith.eval.chosen import chosen_elsewhere
from draftsmith.eval.measurement import Measurement
from draftsmith.eval.metrics import speed_up
from draftsmith.eval.sweep.choice import Choice, Setting, choose
from made_reports import an_answer


def measured(speeds: Sequence[float]) -> list[Measurement]:
    """A setting that took 1 / speed of plain decoding's time on each prompt."""
    return [an_answer([(0, 0)], prompt=f"p{i}", seconds=1 / speed) for i, speed in enumerate(speeds)]


def chosen(them: Mapping[Setting, Sequence[float]]) -> Choice:
    runs = {setting: measured(speeds) for setting, speeds in them.items()}
    return choose(runs, {setting: speed_up(its, 500) for setting, its in runs.items()}, 500, 0)


def test_a_setting_that_is_surely_faster_is_recommended() -> None:
    found = chosen({("exit:3", 2): [1.2, 1.3, 1.25, 1.3], ("exit:3", 4): [1.0, 1.1, 1.0, 1.1], ("exit:6", 2): [0.8] * 4})
    assert (found.speculate, found.drafter, found.k) == (True, "exit:3", 2)
    assert found.text.startswith("Use exit:3 with k = 2: 1.26 (1.22..1.30) times plain decoding on 4 prompts. Chosen on the other")
    assert found.elsewhere == found.speed_up


@pytest.mark.parametrize(
    ("speeds", "why"), [([0.8, 1.3, 1.5, 0.9], "which does not exclude 1"), ([0.8, 0.9, 0.85, 0.9], "which is slower")]
)
def test_an_interval_that_includes_one_is_no_recommendation(speeds: list[float], why: str) -> None:
    found = chosen({("exit:3", 2): speeds, ("exit:6", 4): [0.5] * 4})
    assert not found.speculate
    assert (found.drafter, found.k) == ("exit:3", 2)
    assert found.text.startswith("Do not speculate: the best setting, exit:3 with k = 2, is ")
    assert why in found.text


def test_one_is_included_at_the_intervals_end() -> None:
    assert not chosen({("exit:3", 2): [1.0] * 4}).speculate
    assert chosen({("exit:3", 2): [1.01] * 4}).speculate


@pytest.mark.parametrize("prompts", [1, 2])
def test_two_prompts_are_no_evidence(prompts: int) -> None:
    found = chosen({("exit:3", 2): [3.0] * prompts, ("exit:6", 2): [2.0] * prompts})
    assert not found.speculate
    assert "Do not speculate on this evidence" in found.text
    assert "takes 3 prompts or more" in found.text


def test_of_equals_the_shortest_block() -> None:
    assert chosen({("exit:3", 4): [1.5] * 3, ("exit:3", 2): [1.5] * 3, ("exit:3", 8): [1.5] * 3}).k == 2


def test_a_winner_by_luck_is_worth_less_elsewhere() -> None:
    lucky = {(f"exit:{i}", 1): [4.0 if place == i else 0.9 for place in range(4)] for i in range(4)}
    them = {setting: measured(speeds) for setting, speeds in lucky.items()}
    assert [one.seconds for one in chosen_elsewhere(them)] == pytest.approx(
        [1 / 0.9] * 4
    )  # the lucky prompt is never its own judge
    found = chosen(lucky)
    assert found.elsewhere.value == pytest.approx(0.9)
    assert found.speed_up.value > 1
