"""One setting out of many, or none: the best of a grid flatters itself, so what its choice is worth is said beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draftsmith.eval.advice import interval as with_interval
from draftsmith.eval.chosen import chosen_elsewhere
from draftsmith.eval.measurement import Measurement
from draftsmith.eval.metrics import Interval, speed_up

Setting = tuple[str, int]  # drafter, k


class Choice(NamedTuple):
    """The fastest setting, whether to serve it, and the speed-up of choosing so on other prompts than those judged."""

    speculate: bool
    drafter: str
    k: int
    speed_up: Interval
    elsewhere: Interval
    text: str


def choose(
    measured: Mapping[Setting, Sequence[Measurement]], speeds: Mapping[Setting, Interval], resamples: int, seed: int
) -> Choice:
    """The setting with the highest measured speed-up (of equals the shortest block), to be served where its whole interval is above 1."""
    best = fastest(speeds)
    speed, prompts = speeds[best], len({one.prompt for one in measured[best]})
    elsewhere = speed_up(chosen_elsewhere(measured), resamples, seed)
    named = f"{best[0]} with k = {best[1]}"
    figure = f"{with_interval(speed._asdict())} times plain decoding on {prompts} prompt{'s' if prompts > 1 else ''}"
    worth = f" Chosen on the other prompts each time, the fastest setting is worth {with_interval(elsewhere._asdict())}."
    if speed.low is None or speed.high is None:
        text = f"Do not speculate on this evidence: the best setting, {named}, is {figure}; an interval takes 3 prompts or more."
        return Choice(False, *best, speed, elsewhere, text)
    if speed.low > 1:
        return Choice(True, *best, speed, elsewhere, f"Use {named}: {figure}.{worth}")
    why = "which is slower" if speed.high < 1 else "which does not exclude 1"
    return Choice(False, *best, speed, elsewhere, f"Do not speculate: the best setting, {named}, is {figure}, {why}.{worth}")


def fastest(speeds: Mapping[Setting, Interval]) -> Setting:
    return max(speeds, key=lambda one: (speeds[one].value, -one[1]))
