"""What a sweep predicts: rounds against enumeration, closed form and the decoder itself; costs and speed-ups by hand."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch

from draftsmith.eval.measurement import Arm
from draftsmith.eval.prediction import costs as clocks
from draftsmith.eval.prediction.chances import chances, said_by, target_chances
from draftsmith.eval.prediction.costs import Clocked, Cost, Stopwatch, cost_of, costs, enough, in_plain_steps
from draftsmith.eval.prediction.predicted import Answer, predict, rounds
from draftsmith.specdec import CombinedDrafter, Drafter, EarlyExitDrafter, ModelDrafter, NgramDrafter, Sampling, generate, to_probs
from draftsmith.specdec.pace import Round
from exits import some_head
from tiny import VOCABULARY, noisy, tiny

PROMPT = [1, 7, 12, 7, 12, 30]


def simulated(stays: tuple[bool, ...], k: int) -> tuple[int, list[int], list[int]]:
    """The decoder's own loop over which token of a text would be accepted: rounds, and tried and accepted drafts by position."""
    n, at, calls, tried, accepted = len(stays), 1, 0, [0] * k, [0] * k
    while at < n:
        calls += 1
        block = min(k, n - at - 1)
        kept = 0
        while kept < block:
            tried[kept] += 1
            if not stays[at + kept]:
                break
            accepted[kept] += 1
            kept += 1
        at += kept + 1
    return calls, tried, accepted


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_expected_rounds_are_those_of_all_outcomes_enumerated(k: int) -> None:
    chance = [random.Random(place).random() for place in range(7)]
    calls, tried, accepted = 0.0, [0.0] * k, [0.0] * k
    for stays in itertools.product((False, True), repeat=7):
        weight = 1.0
        for one, a in zip(stays, chance, strict=True):
            weight *= a if one else 1 - a
        made = simulated(stays, k)
        calls += weight * made[0]
        tried = [one + weight * more for one, more in zip(tried, made[1], strict=True)]
        accepted = [one + weight * more for one, more in zip(accepted, made[2], strict=True)]
    found = rounds(chance, k)
    assert found.calls == pytest.approx(calls, abs=1e-12)
    assert found.tried == pytest.approx(tried, abs=1e-12)
    assert found.accepted == pytest.approx(accepted, abs=1e-12)


@pytest.mark.parametrize(("alpha", "k"), [(0.6, 1), (0.6, 4), (0.9, 3), (0.0, 2), (1.0, 5)])
def test_a_constant_acceptance_gives_the_closed_form(alpha: float, k: int) -> None:
    n = 3001
    tau = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    assert (n - 1) / rounds([alpha] * n, k).calls == pytest.approx(tau, rel=2e-3)


@pytest.mark.parametrize("n", [1, 2])
def test_the_shortest_answers(n: int) -> None:
    assert rounds([0.5] * n, 3).calls == n - 1  # the first token is the prefill's; the last is never a draft
    assert rounds([0.5] * n, 3).tried == [0, 0, 0]


def test_blocks_that_hang_on_where_they_began() -> None:
    found = rounds([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], 2)
    assert found.calls == 3  # 1 2 3, then 4 refused, then 5, which is the last
    assert found.tried == [2, 1]
    assert found.accepted == [1, 1]


def test_a_prediction_by_hand() -> None:
    cost = Cost(c=0.1, r=1.2, o=0.05, prefill=1.1)
    answers = [Answer(5, 0.3, 1.0, {"exit:1": [0.0, 1.0, 1.0, 0.0, 0.0]}), Answer(3, 0.1, 1.0, {"exit:1": [1.0, 0.0, 1.0]})]
    found = predict(answers, "exit:1", 2, cost)
    # 5 tokens: 1 2 3 | 4, where nothing is left to draft; 3 tokens: 1 refused | 2.
    assert found.tau == 6 / 4
    assert found.tokens_per_call == 8 / 6
    assert found.by_position == [1 / 2, 1.0]
    assert found.alpha == pytest.approx(3 / 6)
    assert found.decoding == pytest.approx(1.5 / (0.2 + 1.2 + 0.05))
    assert found.speed_up == pytest.approx(1 / (0.2 * 1.1 + 0.8 / found.decoding))


def drafter_named(name: str, target: Any) -> Drafter:
    made: dict[str, Any] = {
        "exit": lambda: EarlyExitDrafter(target, 2),
        "whole": lambda: EarlyExitDrafter(target, 3),
        "model": lambda: ModelDrafter(noisy(target, 0.2)),
        "ngram": lambda: NgramDrafter(),
        "adapter": lambda: EarlyExitDrafter(target, *some_head(target, "adapter")),
        "block": lambda: EarlyExitDrafter(target, *some_head(target, "block")),
        "lora": lambda: EarlyExitDrafter(target, *some_head(target, "lora")),
        "both": lambda: CombinedDrafter(NgramDrafter(), ModelDrafter(noisy(target, 0.2))),
    }
    return made[name]()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["exit", "whole", "adapter", "block", "lora", "model", "ngram", "both"])
def test_a_greedy_prediction_is_what_the_decoder_does(name: str, k: int) -> None:
    target = tiny("llama", seed=2)
    drafter = drafter_named(name, target)
    plain = generate(target, [PROMPT], max_new_tokens=24).tokens[0]
    found = rounds(chances(drafter, [*PROMPT, *plain], len(plain), k, Sampling(), None), k)
    out = generate(target, [PROMPT], drafter, k=k, max_new_tokens=24)
    assert out.tokens[0] == plain
    assert found.calls == len(out.rounds[0]) - 1
    assert sum(found.accepted) == sum(kept for _, kept in out.rounds[0])
    if name == "whole":
        assert found.accepted == found.tried


def test_a_drawn_token_averages_to_the_overlap_of_both_laws() -> None:
    target = tiny("llama", seed=2)
    drafter, how = ModelDrafter(noisy(target, 0.1)), Sampling(0.8, top_k=40)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        p, q = (to_probs(one(input_ids=ids).logits[0, -1], how) for one in (target, drafter.model))
    mean = 0.0
    for token in (p > 0).nonzero()[:, 0].tolist():
        text = [*PROMPT, token]
        chance = target_chances(target, text, 1, how, VOCABULARY)
        assert chance is not None
        assert float(chance) == pytest.approx(float(p[token]), abs=1e-6)
        (stays,) = chances(drafter, text, 1, 3, how, chance)
        assert isinstance(stays, float)
        assert 0 <= stays <= 1
        mean += float(p[token]) * stays
    overlap = float(torch.minimum(p, q).sum())
    assert 0.05 < overlap < 0.95
    assert mean == pytest.approx(overlap, abs=1e-5)


def test_a_text_that_outgrows_the_draft_is_walked_as_the_decoder_would() -> None:
    target = tiny("llama", seed=2)
    draft = noisy(target, 0.2)
    draft.config.max_position_embeddings = 14
    drafter = ModelDrafter(draft)
    plain = generate(target, [PROMPT], max_new_tokens=24).tokens[0]
    text = [*PROMPT, *plain]
    assert said_by(drafter, text, len(plain), Sampling()) is None
    found = rounds(chances(drafter, text, len(plain), 2, Sampling(), None), 2)
    assert found.calls == len(generate(target, [PROMPT], drafter, k=2, max_new_tokens=24).rounds[0]) - 1


def test_a_trimmed_draft_never_says_what_it_cannot() -> None:
    target = tiny("llama", seed=2)
    drafter = ModelDrafter(target, ids=torch.arange(0, 41, 2))
    found = said_by(drafter, [*PROMPT, 4, 7, 60], 3, Sampling(1.0))
    assert found is not None
    assert found[0] > 0
    assert found[1:].tolist() == [0, 0]  # between the ids that it says, and beyond them


def test_drafts_that_are_drawn_behind_drafts_are_refused() -> None:
    target = tiny("llama", seed=2)
    with pytest.raises(ValueError, match=r"a CombinedDrafter draws its drafts.*sweep it at temperature 0"):
        chances(drafter_named("both", target), [*PROMPT, 5, 9], 2, 2, Sampling(1.0), torch.ones(2))


def test_costs_are_counted_in_plain_steps() -> None:
    plain = Clocked([Round(0, 1, [0], [0], [0], 0.1, 0.7)] * 9 + [Round(0, 1, [0], [0], [0], 50.0, 50.0)], [0.2, 0.2], [2.0])
    them = Clocked([Round(4, 5, [4], [1], [0], 0.8, 1.5)] * 3, [0.5], [3.0])
    step, reading, found = in_plain_steps(plain, {"exit:1, k = 4": them}, {"exit:1, k = 4": 4})
    assert step == pytest.approx(1.0)  # call, loop and all; the outlier is trimmed away
    assert reading == 2.0
    cost = found["exit:1, k = 4"]
    assert cost[:4] == pytest.approx(Cost(c=0.2, r=1.5, o=0.5, prefill=1.5)[:4])
    assert cost.tau == 2.0  # one of four drafts stayed, and the target's own token
    assert cost.widths == ((5, pytest.approx(1.5)),)
    assert cost_of(json.loads(json.dumps(cost._asdict()))) == cost


def test_the_clocks_run_on_every_setting() -> None:
    target = tiny("llama", seed=2)
    one, other = EarlyExitDrafter(target, 1), NgramDrafter()
    arms = [Arm("a", one, 1), Arm("b", one, 3), Arm("c", other, 2)]
    steps: list[int] = []
    step, reading, found = costs(target, [[PROMPT], [PROMPT[:3]]], arms, Sampling(), 0, VOCABULARY, steps.append)
    assert step > 0
    assert reading > 0
    assert set(found) == {"a", "b", "c"}
    assert all(min(each[:4]) > 0 for each in found.values())
    assert [n for n, _ in found["b"].widths] == [4]
    once: list[int] = []
    costs(target, [[PROMPT]], arms, Sampling(), 0, VOCABULARY, once.append, rounds=3, beside=False)
    assert once == [1, 2, 3, 4]  # plain decoding but once
    assert steps == list(range(1, 11))  # two texts, three settings, plain decoding beside each of two drafters


def test_only_whole_blocks_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Clocked] = {}
    monkeypatch.setattr(clocks, "in_plain_steps", lambda plain, found, ks: seen.update(found))
    target = tiny("llama", seed=2)
    costs(target, [[PROMPT]], [Arm("all accepted", EarlyExitDrafter(target, 3), 3)], Sampling(), 0, VOCABULARY)
    assert [one.k for one in seen["all accepted"].rounds] == [3, 3]  # of 12 tokens the prefill's, two blocks, and a shorter one


def test_the_stopwatch_is_a_fixed_pace() -> None:
    target = tiny("llama", seed=2)
    watch = Stopwatch(3)
    out = generate(target, [PROMPT], EarlyExitDrafter(target, 1), pace=watch, max_new_tokens=12)
    assert out.rounds == generate(target, [PROMPT], EarlyExitDrafter(target, 1), k=3, max_new_tokens=12).rounds
    assert len(watch.rounds) == len(out.rounds[0]) - 1
    assert watch.rounds[0].k == 3


def test_the_clocks_take_a_few_hundredths_of_the_decoding() -> None:
    assert [enough(answers, 48) for answers in (1, 6, 20, 96, 10_000)] == [(1, 3), (1, 3), (1, 8), (3, 8), (3, 8)]
