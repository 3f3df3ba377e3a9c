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
    """A match and a luck for every place, the same whoever speaks; how likely a lookup is right behind so many tokens, and the model."""

    def __init__(self, seed: int, by_match: dict[int, float], model: Callable[[int], float]) -> None:
        chance = random.Random(seed)
        self.matches = [chance.choice(MATCHES) for _ in range(5000)]
        self.luck = [chance.random() for _ in range(5000)]
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
        while kept < n and text.luck[written + kept] < right:
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
    """The mean of calls of one pace, the first two left out."""
    pace = Adaptive()
    times = [play(pace, text(call), able, c, r, seed=call) for call in range(8)]
    return sum(times[2:]) / 6


COPIES, ODD, USELESS = {1: 0.35, 2: 0.55, 4: 0.8, 8: 0.95}, {1: 0.05, 2: 0.1, 4: 0.3, 8: 0.5}, {1: 0.0}


@pytest.mark.parametrize(("c", "machine"), [(0.02, GPU), (0.2, GPU), (0.8, GPU), (0.2, CPU)])
@pytest.mark.parametrize("model", [0.05, 0.4, 0.8])
@pytest.mark.parametrize("lookup", [COPIES, ODD])
def test_both_are_never_behind_the_better_one_alone(
    lookup: dict[int, float], model: float, c: float, machine: Callable[[int], float]
) -> None:
    """From a model that never pays to a lookup that never does, and where both do, each where it is better."""

    def text(call: int) -> Text:
        return Text(call, lookup, lambda at: model)

    both = after_a_while(text, (BY_MATCH, LOOKUP, MODEL), c, machine)
    alone = [after_a_while(text, (way,), c, machine) for way in (LOOKUP, MODEL)]
    assert both < 1.05 * min(*alone, 1.0), (both, alone)


@pytest.mark.parametrize("c", [0.02, 0.2])
def test_a_model_that_turns_good_and_bad_in_mid_text_is_heard_while_it_is_good(c: float) -> None:
    def right(at: int) -> float:
        return 0.85 if at // 400 % 2 else 0.0

    text = Text(3, ODD, right)
    both, lookup, model = (play(Adaptive(), text, able, c, GPU, 2400) for able in ((BY_MATCH, LOOKUP, MODEL), (LOOKUP,), (MODEL,)))
    assert both < 1.02 * min(lookup, model), (both, lookup, model)
    good, bad = (
        play(Adaptive(), Text(3, ODD, lambda at, p=p: p), (way,), c, GPU, 2400) for p, way in ((0.85, MODEL), (0.0, LOOKUP))
    )  # type: ignore[misc]
    assert both < 1.25 * (good + bad) / 2, (both, good, bad)


@pytest.mark.parametrize("c", [0.2, 0.8])
@pytest.mark.parametrize("machine", [GPU, lambda n: 1.0 if n == 1 else 1.6 + 0.02 * n])
def test_two_that_are_useless_lose_no_more_than_one(machine: Callable[[int], float], c: float) -> None:
    for tokens in (40, 128):
        pace = Adaptive()
        times = [play(pace, Text(call, USELESS, lambda at: 0.0), (0, 1, 2), c, machine, tokens, seed=call) for call in range(8)]
        assert max(times) < 1.05, (tokens, times)


def test_a_long_prompt_is_not_read_for_the_few_words_that_are_left() -> None:
    """A model that pays for itself in a long text is not asked in a short one, once what reading takes is known."""
    pace = Adaptive()
    for call in range(6):
        play(pace, Text(call, ODD, lambda at: 0.6), (BY_MATCH, LOOKUP, MODEL), 0.1, GPU, 400, seed=call)
    asked = {}
    for tokens in (20, 2000):
        pace.begin(100.0, tokens)
        pace.observe(Round(0, 1, [0], [0], [0], 0.0, 1.0))
        asked[tokens] = pace.next([0])
    assert asked[20] == 0
    assert asked[2000] > 1
