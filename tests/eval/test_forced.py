"""Teacher-forced acceptance against the decoder's own, with every random choice enumerated; and what a round's model makes of figures."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from branches import every_path, target_law
from draftsmith.eval.measurement import Measurement
from draftsmith.eval.prediction.costs import Cost
from draftsmith.eval.prediction.explained import break_even, explained, forecast, foretold, tally, with_block
from draftsmith.eval.prediction.forced import Forced, forced, lawful
from draftsmith.eval.prediction.predicted import rounds
from draftsmith.specdec import CombinedDrafter, EarlyExitDrafter, ModelDrafter, NgramDrafter, Sampling, generate, to_probs
from made_reports import an_answer
from tiny import VOCABULARY, ScriptedLM, noisy, tiny

PROMPT = [0, 1]
HOWS = [Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.8)]


class Constant(ScriptedLM):
    """Its law hangs on nothing, so every token is accepted with the same chance."""

    def law(self, prefix: tuple[int, ...]) -> Tensor:
        return super().law(())


def decoded(
    target: Any, draft: Any, how: Sampling, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[float], list[float]]:
    """Expected rounds behind the prefill, and tried and accepted drafts by position, of the decoder itself."""
    calls, tried, kept = 0.0, [0.0] * k, [0.0] * k
    seen: list[list[tuple[int, int]]] = []

    def run() -> list[int]:
        out = generate(target, [PROMPT], ModelDrafter(draft), k=k, max_new_tokens=n, how=how)
        seen.append(out.rounds[0][1:])
        return out.tokens[0]

    total = 0.0
    for _, chance in every_path(run, True, monkeypatch):
        total += chance
        calls += chance * len(seen[-1])
        for drafted, accepted in seen[-1]:
            for place in range(min(accepted + 1, drafted)):
                tried[place] += chance
                kept[place] += chance * (place < accepted)
    return calls / total, [one / total for one in tried], [one / total for one in kept]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("k", [1, 2])
def test_what_is_forced_is_what_the_decoder_is_expected_to_do(how: Sampling, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, n = ScriptedLM(3, "target"), ScriptedLM(3, "draft"), 4
    found: dict[str, Any] = defaultdict(float)
    tried, kept = [0.0] * k, [0.0] * k
    law = target_law(target, PROMPT, how, n)
    alpha, total = 0.0, sum(law.values())
    for text, chance in law.items():
        if not chance:
            continue
        one = forced(target, {"d": (ModelDrafter(draft), [k])}, [*PROMPT, *text], n, how, 3)["d"]  # type: ignore[arg-type]
        assert one.positions == n - 1
        found["overlap"] += chance * one.overlap / total
        found["calls"] += chance * one.rounds[k].calls / total
        tried = [a + chance * b / total for a, b in zip(tried, one.rounds[k].tried, strict=True)]
        kept = [a + chance * b / total for a, b in zip(kept, one.rounds[k].accepted, strict=True)]
        for place in range(1, n):
            p, q = (to_probs(model.law((*PROMPT, *text[:place])), how) for model in (target, draft))
            alpha += chance * float(torch.minimum(p, q).sum()) / total
    assert found["overlap"] == pytest.approx(alpha, abs=1e-5)
    calls, said_tried, said_kept = decoded(target, draft, how, n, k, monkeypatch)
    assert found["calls"] == pytest.approx(calls, abs=1e-5)
    assert tried == pytest.approx(said_tried, abs=1e-5)
    assert kept == pytest.approx(said_kept, abs=1e-5)


@pytest.mark.parametrize("how", HOWS)
def test_alpha_is_the_measured_acceptance_where_all_prefixes_are_alike(how: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, n = Constant(3, "target"), Constant(3, "draft"), 4
    text = [*PROMPT, 0, 0, 0, 0]
    one = forced(target, {"d": (ModelDrafter(draft), [2])}, text, n, how, 3)["d"]  # type: ignore[arg-type]
    _, tried, kept = decoded(target, draft, how, n, 2, monkeypatch)
    assert 0.1 < one.overlap / one.positions < 0.95
    assert one.overlap / one.positions == pytest.approx(sum(kept) / sum(tried), abs=1e-5)


def test_one_pass_of_each_and_none_of_the_target_at_temperature_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama", seed=2)
    draft = noisy(target, 0.2)
    calls: dict[str, int] = defaultdict(int)
    for name, model in (("target", target), ("draft", draft)):
        model.register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    text = [1, 7, 12, *range(20, 52), *range(3, 43)]  # more answer than a stretch of laws
    drafters = {"d": (ModelDrafter(draft), [1, 2, 4])}
    greedy = forced(target, drafters, text, 70, Sampling(), VOCABULARY)["d"]
    assert dict(calls) == {"draft": 1}
    assert greedy.overlap == int(greedy.overlap)
    drawn = forced(target, drafters, text, 70, Sampling(1.0), VOCABULARY)["d"]
    assert dict(calls) == {"draft": 2, "target": 1}
    with torch.no_grad():
        ids = torch.tensor([text[:-1]])
        p, q = (model(input_ids=ids).logits[0, -70:].softmax(-1) for model in (target, draft))
    assert drawn.overlap == pytest.approx(float(torch.minimum(p, q).sum(-1)[1:].sum()), rel=1e-5)
    assert set(drawn.rounds) == {1, 2, 4}


def test_who_has_laws() -> None:
    target = tiny("llama", seed=2)
    model, exit_ = ModelDrafter(noisy(target, 0.2)), EarlyExitDrafter(target, 2)
    assert lawful(model) is model
    assert lawful(exit_) is exit_
    assert lawful(CombinedDrafter(NgramDrafter(), exit_)) is exit_
    assert lawful(NgramDrafter()) is None
    assert lawful(None) is None


def test_an_answer_of_one_token_has_nothing_to_force_and_one_that_the_draft_cannot_read_is_left_out() -> None:
    target = tiny("llama", seed=2)
    draft = noisy(target, 0.2)
    drafters = {"d": (ModelDrafter(draft), [2])}
    assert forced(target, drafters, [1, 7, 12], 1, Sampling(1.0), VOCABULARY) == {"d": Forced(0.0, 0, {2: rounds([0.0], 2)})}
    draft.config.max_position_embeddings = 4
    assert forced(target, drafters, [1, 7, 12, 9, 9, 9], 3, Sampling(), VOCABULARY) == {}


def measured(
    rounds: list[tuple[int, int]], rows: int = 1, prompt: str = "x", draft: float = 0.1, target: float = 0.6, **more: Any
) -> Measurement:
    """Plain decoding: half a second for the prompt and a tenth a step; ours: so much longer to read, and so many seconds a round."""
    new, behind = sum(accepted + 1 for _, accepted in rounds), len(rounds) - 1
    return an_answer(
        rounds, prompt=prompt, batch=rows, rows=rows, seconds=0.6 + behind * (draft + target + 0.02), baseline_seconds=0.5 + 0.1 * (new - 1),
        prefill_seconds=0.6, baseline_prefill_seconds=0.5, draft_seconds=behind * draft, target_seconds=behind * target, **more,
    )  # fmt: skip


SOME = [(0, 0), (3, 3), (3, 0), (2, 1)]


def test_the_costs_of_a_round_by_hand() -> None:
    both = tally([measured(SOME), measured([(0, 0), (3, 2)], prompt="y")], 3, drafts_all=True)
    assert (both.rounds, both.tokens, both.behind, both.plain_rounds, both.asked) == (4, 12, 10, 10, 11)
    assert both.tau == 10 / 4
    assert both.cost[:4] == pytest.approx((0.4 / 11 / 0.1, 6.0, 0.2, 1.2))
    assert tally([measured(SOME)], 3, drafts_all=False).asked == 9  # a look costs the same, whatever it finds


def test_rows_of_a_batch_share_its_rounds_and_its_seconds() -> None:
    long, short = measured(SOME, rows=2, group="g"), measured([(0, 0), (3, 0)], rows=2, prompt="y", group="g")
    both = tally([long, short], 3, drafts_all=True)
    assert (both.rounds, both.plain_rounds, both.behind, both.asked) == (3, 7, 8, 9)
    assert both.tau == pytest.approx(8 / 3 * 7 / 8)  # plain decoding, too, went on for the longer row alone
    apart = tally([long, measured([(0, 0), (3, 0)], rows=2, prompt="y", group="g", turn=1)], 3, drafts_all=True)
    assert apart.rounds == 4


def test_a_half_is_predicted_with_the_costs_of_the_other() -> None:
    cheap, dear = measured(SOME), measured(SOME, prompt="y", draft=0.2, target=0.9)
    said = explained([cheap, dear], 3, drafts_all=True)
    assert said is not None
    # Their rounds are alike, so swapping the costs changes no sum.
    ours, plain = cheap.seconds + dear.seconds, 2 * cheap.baseline_seconds
    assert said["speed_up"] == pytest.approx(plain / ours)
    assert said["decoding"] == pytest.approx(said["tau"] / (said["drafted"] * said["c"] + said["r"] + said["o"]))
    longer = measured([*SOME, *SOME[1:]], prompt="y", draft=0.2, target=0.9)
    swapped = explained([cheap, longer], 3, drafts_all=True)
    assert swapped is not None
    rounds_of_cheap, rounds_of_longer = 3 * (0.2 + 0.9 + 0.02), 6 * (0.1 + 0.6 + 0.02)
    plain = cheap.baseline_seconds + longer.baseline_seconds
    assert swapped["speed_up"] == pytest.approx(plain / (2 * 0.6 + rounds_of_cheap + rounds_of_longer))
    assert explained([cheap], 3, drafts_all=True) is None  # no other half
    assert explained([cheap, measured([(0, 0)], prompt="y")], 3, drafts_all=True) is None


def test_a_forecast_is_by_clocks_that_were_read_before() -> None:
    clocked = Cost(c=0.5, r=9.0, o=0.1, prefill=1.5, widths=((1, 1.0), (2, 1.2), (4, 2.0)))
    # Rounds fed 4, 4 and 3 tokens, 8 of them drafts, of plain steps of 0.1 s: 2.0, 2.0 and, between two that were clocked, 1.6.
    alone = forecast([measured(SOME)], 3, True, clocked)
    assert alone == pytest.approx((0.5 + 0.7) / (0.5 * 1.5 + 0.1 * (8 * 0.5 + 2.0 + 2.0 + 1.6 + 3 * 0.1)))
    assert forecast([measured(SOME, draft=9.0, target=9.0)], 3, True, clocked) == alone, "no clock of these answers is in it"
    # A batch is fed what its longest block needs, for as long as its longest row goes on.
    rows = [measured(SOME, rows=2, group="g"), measured([(0, 0), (1, 0), (3, 3)], rows=2, prompt="y", group="g")]
    both = forecast(rows, 3, False, clocked)
    assert both is not None
    taken = 3 * 3 * 0.5 + 2.0 + 2.0 + 1.6 + 3 * 0.1
    assert both == pytest.approx((1.0 + 1.2) / (1.0 * 1.5 + 1.2 / 7 * taken))
    assert forecast([measured(SOME)], 3, True, clocked._replace(widths=())) is None


def test_break_even() -> None:
    assert break_even({1: 7}, 1.4) == pytest.approx(0.4)
    assert break_even({2: 1}, 1 + 0.5 + 0.25) == pytest.approx(0.5)
    assert break_even({4: 1}, 5.5) is None
    assert break_even({4: 1}, 0.9) == 0.0
    assert break_even({3: 1}, 4.0) == pytest.approx(1.0)
    # A lookup that finds two drafts in a round of four: what pays must come from there.
    assert break_even({0: 3, 2: 1}, 1 + (0.5 + 0.25) / 4) == pytest.approx(0.5)
    assert break_even({0: 3, 2: 1}, 1.6) is None


def test_forced_figures_are_pooled_over_tokens() -> None:
    rows = [("x", Forced(3.0, 4, {2: rounds([0, 1, 1, 0, 0.5], 2)})), ("y", Forced(0.0, 2, {2: rounds([0, 0, 0], 2)}))]
    said, units = foretold(rows, 2, "the draft")
    assert said["alpha"] == 0.5  # not the mean of .75 and 0
    assert units == {"x": (3.0, 4), "y": (0.0, 2)}
    calls = sum(one.rounds[2].calls for _, one in rows)
    assert said["block_length"] == 6 / calls
    adaptive, _ = foretold(rows, "adaptive", "the draft")
    assert (adaptive["alpha"], adaptive["block_length"], adaptive["by_position"]) == (0.5, None, None)


def test_a_block_length_at_the_measured_costs() -> None:
    some = [measured(SOME)]  # 7 tokens behind the prefill in 3 rounds
    assert with_block(some, 3, True, 7 / 3) == pytest.approx(some[0].baseline_seconds / some[0].seconds)
    assert with_block(some, 3, True, 7 / 6) == pytest.approx(some[0].baseline_seconds / (0.6 + 2 * (some[0].seconds - 0.6)))
    assert with_block([measured([(0, 0)])], 3, True, 2.0) is None
