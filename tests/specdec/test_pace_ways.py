"""An adaptive pace that may choose who speaks, on made-up machines and texts: never behind the better of the two alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draftsmith.specdec.pace import Adaptive, Round

GPU, CPU = (lambda n: 1 + 0.01 * (n - 1)), (lambda n: 1.0 if n == 1 else 1.25 + 0.02 * n)
BY_MATCH, LOOKUP, MODEL = range(3)
MATCHES = [-1, 1, 1, 2, 2, 4, 8]


class Text:
    """A match for every place, how likely a lookup is right behind one of so many tokens, and how likely the model is."""

    def __init__(self, seed: int, by_match: dict[int, float], model: Callable[[int], float]) -> None:
        chance = random.Random(seed)
        self.matches = [chance.choice(MATCHES) for _ in range(5000)]
        self.by_match, self.model = by_match, model


def play(
    pace: Adaptive, text: Text, able: tuple[int, ...], c: float, r: Callable[[int], float], tokens: int = 300, seed: int = 0
) -> float:
    """Seconds of a call over what plain decoding takes, with the ways of `able` alone."""
    chance, written, seconds, prefill, unread = random.Random(seed), 0, 5.0, 5.0, 0.2
    pace.begin(prefill, tokens)
    while written < tokens:
        match = text.matches[written]
        every = [[match if match >= 3 else 0], [match], [0]]
        k, way = pace.choose([every[one] for one in able])
        said = every[able[way]][0]
        k, right = min(k, tokens - written - 1), text.model(written) if said == 0 else text.by_match.get(said, 0.0)
        n, kept = (k if said >= 0 else 0), 0
        while kept < n and chance.random() < right:
            kept += 1
        blur = chance.uniform(0.97, 1.03)
        draft, target = (n * c * blur if said == 0 else 0.001 * n), r(n + 1) * blur
        if n and said == 0:
            draft, unread = draft + unread * prefill, 0.0
        pace.observe(Round(k, n + 1, [n], [kept], [said], draft, target))
        seconds += draft + target
        written += kept + 1
    return seconds / (prefill + written)


def after_a_while(text: Callable[[int], Text], able: tuple[int, ...], c: float, r: Callable[[int], float]) -> float:
    """The mean of calls of one pace, the first left out."""
    pace = Adaptive()
    times = [play(pace, text(call), able, c, r, seed=call) for call in range(12)]
    return sum(times[2:]) / 10


LOOKUPS = {"a lookup that copies": {1: 0.35, 2: 0.55, 4: 0.8, 8: 0.95}, "one that does not": {1: 0.05, 2: 0.1, 4: 0.3, 8: 0.5}}


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("c", [0.02, 0.2, 0.8])
@pytest.mark.parametrize("model", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("lookup", list(LOOKUPS))
def test_both_are_never_behind_the_better_one_alone(lookup: str, model: float, c: float, machine: Callable[[int], float]) -> None:
    def text(call: int) -> Text:
        return Text(call, LOOKUPS[lookup], lambda at: model)

    both = after_a_while(text, (BY_MATCH, LOOKUP, MODEL), c, machine)
    alone = {way: after_a_while(text, (way,), c, machine) for way in (LOOKUP, MODEL)}
    print(f"{lookup}, model {model}, c {c}: both {both:.3f}, {alone}, by match {after_a_while(text, (BY_MATCH,), c, machine):.3f}")
    assert both < 1.05 * min(*alone.values(), 1.0)
