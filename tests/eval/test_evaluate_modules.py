"""The metrics that others load by `evaluate`: from their folders, without a network, and equal to what our own report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval import Measurement, metrics
from made_reports import an_answer

FOLDER = Path(__file__).parent.parent.parent / "eval" / "metrics"
DRAFTED = [3, 3, 3, 2, 0]
ACCEPTED = [3, 0, 1, 2, 0]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`evaluate.load` of one of our folders; what it copies goes to a folder of the test's own."""
    home = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as set_to:
        set_to.setenv("HF_HUB_OFFLINE", "1")
        set_to.setenv("HF_MODULES_CACHE", str(home / "modules"))
        import evaluate

        yield lambda name: evaluate.load(str(FOLDER / name), cache_dir=str(home / "cache"))


def one(prompt: str, new: int, seconds: float, baseline_tokens: int, baseline_seconds: float) -> Measurement:
    return an_answer(
        zip(DRAFTED, ACCEPTED, strict=True), prompt=prompt, new_tokens=new, seconds=seconds, baseline_tokens=baseline_tokens,
        baseline_seconds=baseline_seconds,
    )  # fmt: skip


def test_acceptance_rate(load: Any) -> None:
    found = load("acceptance_rate").compute(drafted=DRAFTED, accepted=ACCEPTED)
    ours = [one("x", 11, 1.0, 11, 1.0)]
    by_place = metrics.acceptance_by_position(ours)
    assert found == {
        "acceptance_rate": metrics.accepted_per_drafted(ours),
        "num_drafts": 4,  # the plain call is no draft
        "num_draft_tokens": 11,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": [accepted for accepted, _ in by_place],
        "acceptance_rate_per_pos": [3 / 4, 2 / 4, 1 / 4],
        "conditional_acceptance": [accepted / tried for accepted, tried in by_place],
    }
    nothing = load("acceptance_rate").compute(drafted=[0], accepted=[0])
    assert (nothing["acceptance_rate"], nothing["num_drafts"], nothing["conditional_acceptance"]) == (None, 0, [])
    with pytest.raises(ValueError, match="a round of 3 drafted and 4 accepted tokens: leave the target's own token out"):
        load("acceptance_rate").compute(drafted=[3], accepted=[4])
    with pytest.raises(ValueError, match="a round of 0 drafted and 1 accepted"):
        load("acceptance_rate").compute(drafted=[0], accepted=[1])


def test_block_efficiency(load: Any) -> None:
    metric = load("block_efficiency")
    for drafted, accepted in zip(DRAFTED, ACCEPTED, strict=True):
        metric.add(drafted=drafted, accepted=accepted)
    assert metric.compute() == {
        "block_efficiency": metrics.tokens_per_call([one("x", 11, 1.0, 11, 1.0)]),  # 11 tokens in 5 calls
        "mean_acceptance_length": 1 + 6 / 4,  # vLLM's: 1 + accepted / drafts
        "accepted_length": 6 / 4,
        "num_calls": 5,
        "num_drafts": 4,
        "histogram": [1, 1, 1, 1],
    }
    nothing = load("block_efficiency").compute(drafted=[0, 0], accepted=[0, 0])
    assert (nothing["block_efficiency"], nothing["mean_acceptance_length"], nothing["histogram"]) == (1.0, None, [])
    with pytest.raises(ValueError, match="a call with 2 drafted and 3 accepted tokens"):
        load("block_efficiency").compute(drafted=[2], accepted=[3])


def test_speedup(load: Any) -> None:
    ours = [one(f"p{i}", 10 + i, 1.0, 10, 1.0 + (i % 2)) for i in range(10)]
    columns = {
        "new_tokens": [float(m.new_tokens) for m in ours], "seconds": [m.seconds for m in ours],
        "baseline_new_tokens": [float(m.baseline_tokens) for m in ours], "baseline_seconds": [m.baseline_seconds for m in ours],
    }  # fmt: skip
    found, wanted = load("speedup").compute(**columns), metrics.speed_up(ours, 2000)
    assert found["speedup"] == pytest.approx(wanted.value)
    assert found["low"] == pytest.approx(wanted.low, rel=0.05)
    assert found["high"] == pytest.approx(wanted.high, rel=0.05)
    assert found["low"] < found["speedup"] < found["high"]
    narrow = load("speedup").compute(**columns, confidence=0.5)
    assert found["low"] < narrow["low"] < narrow["high"] < found["high"]
    two = load("speedup").compute(**{name: some[:2] for name, some in columns.items()})
    assert (two["low"], two["prompts"]) == (None, 2)
    slow = [1.0 + i for i in range(10)]
    same = load("speedup").compute(
        new_tokens=[9.0] * 10, seconds=slow, baseline_new_tokens=[9.0] * 10, baseline_seconds=[2 * one for one in slow]
    )
    assert (
        same["low"] == same["high"] == same["speedup"] == pytest.approx(2.0)
    )  # each prompt is twice as fast: paired, nothing varies
    with pytest.raises(ValueError, match="a prompt without tokens or without seconds has no speed"):
        load("speedup").compute(**{**columns, "seconds": [0.0] * 10})
