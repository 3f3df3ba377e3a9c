"""The adaptive pace on made-up machines and texts, its clock simulated: never much slower than plain decoding, near the best k."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draftsmith.specdec import ModelDrafter, NgramDrafter, Sampling, generate
from draftsmith.specdec.pace import Adaptive, Fixed, Round
from tiny import noisy, plain_greedy, tiny

GPU, CPU = (lambda n: 1 + 0.01 * (n - 1)), (lambda n: 1.0 if n == 1 else 1.6 + 0.02 * n)


def play(
    pace: Adaptive | Fixed, accept: Callable[[int], float], evidence: Callable[[int], int], c: float, r: Callable[[int], float],
    tokens: int, rows: int = 1, prefill: float = 5.0, seed: int = 0, reading: float = 0.2,
) -> float:  # fmt: skip
    """Seconds of a call of `tokens` tokens a row, a plain step taking one second, over what plain decoding takes."""
    chance, written, seconds = random.Random(seed), 0.0, prefill
    pace.begin(prefill, tokens)
    while written < tokens:
        match = [evidence(int(written))] * rows
        k = min(pace.next(match), max(0, int(tokens - written) - 1))
        n = 0 if match[0] < 0 else k
        accepted = []
        for _ in range(rows):
            kept = 0
            while kept < n and chance.random() < accept(int(written)):
                kept += 1
            accepted.append(kept)
        blur = chance.uniform(0.97, 1.03)
        draft, target = (n * c * blur if match[0] == 0 else 0.0), r(n + 1) * blur
        if n and match[0] == 0:
            draft, reading = draft + reading * prefill, 0.0  # a model reads the prompt with its first words
        pace.observe(Round(k, n + 1, [n] * rows, accepted, match, draft, target))
        seconds += draft + target
        written += sum(accepted) / rows + 1
    return seconds / (prefill + written)


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.31, 0.8])
@pytest.mark.parametrize("accept", [0.0, 0.1, 0.3])
def test_a_bad_draft_never_costs_more_than_a_twentieth(machine: Callable[[int], float], c: float, accept: float) -> None:
    for tokens in (40, 128, 600):
        for seed in range(3):
            pace = Adaptive()
            times = [play(pace, lambda at: accept, lambda at: 0, c, machine, tokens, seed=10 * seed + call) for call in range(8)]
            assert max(times) < 1.05, (tokens, times)


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize("c", [0.02, 0.1])
@pytest.mark.parametrize("accept", [0.7, 0.9])
def test_a_good_draft_brings_most_of_what_the_best_fixed_k_does(machine: Callable[[int], float], c: float, accept: float) -> None:
    pace = Adaptive()
    times = [play(pace, lambda at: accept, lambda at: 0, c, machine, 300, seed=call) for call in range(9)]
    ours = sum(times[3:]) / 6
    best = min(
        sum(play(Fixed(k), lambda at: accept, lambda at: 0, c, machine, 300, seed=call) for call in range(6)) / 6 for k in range(9)
    )
    assert ours < 1.15 * best, (ours, best)


def test_a_text_that_turns_bad_is_noticed() -> None:
    pace = Adaptive()
    for call in range(4):
        play(pace, lambda at: 0.9, lambda at: 0, 0.1, GPU, 200, seed=call)
    assert play(pace, lambda at: 0.0, lambda at: 0, 0.1, GPU, 300, seed=5) < 1.05


@pytest.mark.parametrize("slow", [1.5, 3.0])
@pytest.mark.parametrize("c", [0.1, 0.8])
@pytest.mark.parametrize("accept", [0.1, 0.3])
def test_a_slow_first_step_and_a_machine_that_gets_faster_deceive_nobody(slow: float, c: float, accept: float) -> None:
    """Costs measured at a slow moment must not make a bad draft look good for the rest of a text."""
    for tokens in (40, 300):
        pace, clock = Adaptive(), [slow]

        def r(n: int, clock: list[float] = clock) -> float:
            return CPU(n) * (clock.pop() if clock else 1.0)

        assert play(pace, lambda at: accept, lambda at: 0, c, r, tokens, prefill=100.0) < 1.05, tokens
    pace = Adaptive()
    for call in range(4):
        play(pace, lambda at: 0.9, lambda at: 0, c * slow, lambda n: slow * CPU(n), 200, prefill=5 * slow, seed=call)
    assert play(pace, lambda at: accept, lambda at: 0, c, CPU, 300, seed=7) < 1.06


def test_long_matches_are_drafted_and_short_ones_are_not() -> None:
    pace, asked = Adaptive(), {1: [], 6: []}  # type: ignore[var-annotated]

    def match(at: int) -> int:
        return 6 if at // 10 % 2 else 1

    def accept(at: int) -> float:
        return 0.9 if match(at) == 6 else 0.05

    for call in range(5):
        time = play(pace, accept, match, 0.0, CPU, 300, seed=call)
    for _ in range(30):
        for kind, said in asked.items():
            said.append(pace.next([kind]))
    assert time < 0.85
    assert min(asked[6]) >= 3
    assert sum(asked[1]) < 20


def test_a_batch_is_weighed_as_a_whole_and_nothing_to_say_is_a_plain_step() -> None:
    pace = Adaptive()
    for call in range(5):
        time = play(pace, lambda at: 0.8, lambda at: 0, 0.05, GPU, 200, rows=4, seed=call)
    assert time < 0.6
    assert pace.next([-1, -1, -1, -1]) == 0
    assert pace.next([0, 0, 0, 0]) > 2
    for wrong in ({"k_max": 0}, {"slack": 0.0}, {"slack": 1.5}):
        with pytest.raises(ValueError, match="adaptive pace needs"):
            Adaptive(**wrong)  # type: ignore[arg-type]


def test_the_text_under_an_adaptive_pace_is_the_targets_own() -> None:
    target = tiny("llama")
    prompts = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25]]
    wanted = [plain_greedy(target, prompt, 40) for prompt in prompts]
    for drafter in (ModelDrafter(target), ModelDrafter(noisy(target)), NgramDrafter()):
        pace = Adaptive()
        for _ in range(2):
            out = generate(target, prompts, drafter, max_new_tokens=40, pace=pace)
            assert out.tokens == wanted
            assert out.settings["pace"] == "Adaptive"
    assert len(generate(target, prompts, drafter, max_new_tokens=40, pace=Adaptive(), how=Sampling(1.0)).tokens[0]) == 40
