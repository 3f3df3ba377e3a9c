"""Advice from made-up figures: what is said, and what is not where no figure bears it."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.eval.advice import advice
from draftsmith.eval.page.series import with_k


def speed(value: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high}


def candidate(
    drafter: str, k: Any, kinds: dict[str, dict[str, Any]], all_: dict[str, Any], needs: float | str | None = "none"
) -> dict[str, Any]:
    figures = {"drafted": 10, "acceptance_by_position": [(6, 10), (3, 6)]}
    return {
        "drafter": drafter, "k": k, "all": {**figures, "speed_up": all_}, "kinds": {kind: {"speed_up": one} for kind, one in kinds.items()},
        "predicted": None if needs == "none" else {"break_even_alpha": needs},
    }  # fmt: skip


def part(candidates: dict[str, dict[str, Any]], kinds: tuple[str, ...] = ("code", "chat"), **more: Any) -> dict[str, Any]:
    return {
        "setting": {"prompts": "p.jsonl", "temperature": 0.0, "batch": 1},
        "kinds": list(kinds),
        "candidates": candidates,
        "noise": None,
        **more,
    }


GOOD, UNSURE, BAD = speed(1.3, 1.2, 1.4), speed(1.1, 0.9, 1.3), speed(0.8, 0.7, 0.9)


def test_the_best_setting_by_kind_and_where_not_to_speculate() -> None:
    found = advice([
        part({
            "d, k=2": candidate("d", 2, {"code": GOOD, "chat": BAD}, GOOD, 0.41),
            "d, k=4": candidate("d", 4, {"code": UNSURE, "chat": UNSURE}, UNSURE, 0.55),
            "ngram": candidate("ngram", 3, {"code": BAD, "chat": BAD}, BAD, None),
        }, against=[{"a": "d, k=2", "b": "ngram", **speed(1.6, 1.4, 1.8)}], chosen_elsewhere=speed(1.25, 1.1, 1.35))
    ])  # fmt: skip
    assert found == [
        "Use d, k=2: 1.30 (1.20..1.40) times plain decoding.",
        "Chosen on the other prompts each time, the fastest setting is worth 1.25 (1.10..1.35).",
        "The best setting by kind of text: code: d, k=2, 1.30 (1.20..1.40).",
        "Do not speculate on chat (d, k=4: 1.10 (0.90..1.30)): 1 is not excluded.",
        "The break-even of d, k=2 is at an acceptance of 0.41 a draft; it has 0.56.",
        "No acceptance makes ngram with k = 3 pay, with its costs here; it has 0.56.",
        "The better of two: d, k=2, 1.60 (1.40..1.80) times the tokens a second of ngram with k = 3 on the same prompts.",
    ]


@pytest.mark.parametrize(
    ("it", "why"),
    [
        (UNSURE, "is 1.10 (0.90..1.30) times plain decoding, which does not exclude 1."),
        (speed(1.1, 1.0, 1.3), "is 1.10 (1.00..1.30) times plain decoding, which does not exclude 1."),
        (BAD, "is 0.80 (0.70..0.90) times plain decoding, which is slower."),
        (speed(2.0), "is 2.00 times plain decoding; an interval takes 3 prompts or more."),
    ],
)
def test_no_gain_shown_is_no_advice_to_speculate(it: dict[str, Any], why: str) -> None:
    (said,) = advice([part({"d": candidate("d", 2, {"all": it}, it)}, kinds=("all",))])
    assert said == f"Do not speculate: the best setting, d with k = 2, {why}"


def test_drafts_that_cannot_be_told_apart_and_a_clock_that_lies_are_said() -> None:
    found = advice([
        part({
            "a": candidate("a", 2, {"all": GOOD}, GOOD), "b": candidate("b", 2, {"all": GOOD}, speed(1.29, 1.2, 1.4)),
        }, kinds=("all",), against=[{"a": "a", "b": "b", **speed(1.01, 0.97, 1.05)}])
    ])  # fmt: skip
    assert found[1:] == ["Not to be told apart: a with k = 2 and b with k = 2, 1.01 (0.97..1.05) on the same prompts."]
    one = part({"a": candidate("a", 2, {"all": GOOD}, GOOD)}, kinds=("all",))
    assert len(advice([one | {"noise": speed(1.01, 0.98, 1.04)}])) == 1
    assert (
        "plain decoding against itself came out at 1.05 (1.02..1.08), which excludes 1"
        in advice([one | {"noise": speed(1.05, 1.02, 1.08)}])[1]
    )


def test_a_kind_on_which_all_are_slower_is_not_said_to_be_open() -> None:
    one = part({"d": candidate("d", 2, {"code": UNSURE, "chat": BAD}, BAD)})
    assert advice([one])[1:] == [
        "Do not speculate on code (d with k = 2: 1.10 (0.90..1.30)): 1 is not excluded.",
        "Do not speculate on chat (d with k = 2: 0.80 (0.70..0.90)): the best there is slower.",
    ]


def test_a_gain_that_the_clock_alone_could_have_made_is_said_to_be_one() -> None:
    small = speed(1.02, 1.01, 1.03)
    one = part({"d": candidate("d", 2, {"all": small}, small)}, kinds=("all",))
    (_, beware) = advice([one | {"noise": speed(1.0, 0.97, 1.03)}])
    assert beware.startswith(
        "Beware: plain decoding against itself came out at 1.00 (0.97..1.03), and the 1.02 of d with k = 2 lies within"
    )
    assert len(advice([one | {"noise": speed(1.0, 0.99, 1.01)}])) == 1


def test_each_drafter_is_held_against_the_fastest_alone() -> None:
    three = {name: candidate(name, 2, {"all": GOOD}, speed(1.3 - place / 10, 1.1, 1.4)) for place, name in enumerate("abc")}
    pairs = [{"a": a, "b": b, **GOOD} for a, b in ("ab", "ac", "bc")]
    assert len(advice([part(three, kinds=("all",), against=pairs)])) == 1 + 2


def test_a_name_that_holds_the_number_of_a_layer_does_not_hold_k() -> None:
    for name, said in (("exit:2", "exit:2 with k = 2"), ("v 2", "v 2 with k = 2"), ("d, k=2", "d, k=2"), ("d k = 2", "d k = 2")):
        one = part({name: candidate("d", 2, {"all": GOOD}, GOOD)}, kinds=("all",))
        assert advice([one]) == [f"Use {said}: 1.30 (1.20..1.40) times plain decoding."]
        assert with_k(name, one["candidates"][name]) == said.replace(" with k", ", k")
    assert with_k("both, adaptive", {"k": "adaptive"}) == "both, adaptive"


def test_kinds_of_too_few_prompts_are_not_judged() -> None:
    one = part({"d": candidate("d", 2, {"code": speed(1.6), "chat": speed(0.7)}, GOOD)})
    assert advice([one])[1:] == ["Nothing can be said of code, chat alone: fewer than 3 prompts."]


def test_every_part_is_named_where_there_are_several() -> None:
    one = part({"a": candidate("a", "adaptive", {"all": GOOD}, GOOD)}, kinds=("all",))
    assert (
        advice([one, one])[0]
        == "At p.jsonl, temperature 0, batch 1: use a with k = adaptive: 1.30 (1.20..1.40) times plain decoding."
    )
