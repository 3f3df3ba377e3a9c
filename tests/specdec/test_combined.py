"""The combined drafter: one text, two voices, and the model is asked only where it speaks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from draftsmith.specdec import CombinedDrafter, EarlyExitDrafter, ModelDrafter, NgramDrafter, Outcome, Sampling, generate
from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.pace import Adaptive, Round
from tiny import begin, noisy, plain_greedy, tiny

PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25, 3, 3]]
TARGET = tiny("llama")
WANTED = [plain_greedy(TARGET, prompt, 30) for prompt in PROMPTS]


def combined(draft: Any, min_match: int = 2, **settings: Any) -> CombinedDrafter:
    return CombinedDrafter(NgramDrafter(least=0.0, **settings), ModelDrafter(draft), min_match)


@pytest.mark.parametrize("k", range(1, 7))
def test_greedy_text_is_the_targets_own(k: int) -> None:
    for drafter in (combined(noisy(TARGET)), CombinedDrafter(NgramDrafter(), EarlyExitDrafter(TARGET, 1), 1)):
        together = generate(TARGET, PROMPTS, drafter, k=k, max_new_tokens=30)
        assert together.tokens == WANTED
        for prompt, text, rounds in zip(PROMPTS, WANTED, together.rounds, strict=True):
            alone = generate(TARGET, [prompt], drafter, k=k, max_new_tokens=30)
            assert alone.tokens == [text]
            assert alone.rounds == [rounds], "a row's acceptance must not hang on its neighbours"


@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.9)])
def test_where_the_draft_is_the_target_all_that_it_says_is_accepted(how: Sampling) -> None:
    """The lookup is refused at times in between, so the model's cache must hold exactly what stayed."""
    for min_match in (1, 3):
        drafter, spoken = combined(TARGET, min_match), []
        observe = drafter.observe

        def watched(outcome: Outcome, drafter: Any = drafter, observe: Any = observe, spoken: Any = spoken) -> None:
            said = drafter._said
            for by, n, accepted in zip(drafter.matches, said.n.tolist(), outcome.accepted.tolist(), strict=True):
                if by == 0 and accepted < n:
                    spoken.append((n, accepted))
            observe(outcome)

        drafter.observe = watched  # type: ignore[method-assign]
        out = generate(TARGET, [PROMPTS[2]], drafter, k=3, max_new_tokens=60, how=how)
        # The last round's drafts are cut to the room that is left, so it alone may drop some.
        assert len(spoken) <= 1, (min_match, spoken)
        assert sum(accepted for _, accepted in out.rounds[0]) > 0


def test_a_lookup_that_never_speaks_leaves_the_target_as_draft_accepted_whole() -> None:
    drafter = CombinedDrafter(NgramDrafter(corpus=[PROMPTS[0] + WANTED[0]]), ModelDrafter(TARGET), min_match=9)
    out = generate(TARGET, [PROMPTS[0]], drafter, k=4, max_new_tokens=30)
    assert out.tokens == [WANTED[0]]
    assert all(drafted == accepted for drafted, accepted in out.rounds[0])


def test_the_model_is_not_run_for_rows_that_the_lookup_speaks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[list[int]] = []
    columns: list[int] = []
    extend = CachedLM.extend

    def counted(lm: CachedLM, ids: Tensor, valid: Tensor | None, *rest: Any, **named: Any) -> Any:
        fed.append((torch.ones_like(ids) if valid is None else valid).sum(1).tolist())
        columns.append(ids.shape[1])
        return extend(lm, ids, valid, *rest, **named)

    monkeypatch.setattr(CachedLM, "extend", counted)
    drafter = combined(noisy(TARGET))
    repeat, fresh = [1, 2, 3, 4, 1, 2], [11, 12, 13, 14, 15, 16]
    begin(drafter, [repeat, repeat])
    assert fed == [], "a model reads when it is asked to, or when its words are wanted"
    drafter.read()
    fed.clear()
    out = drafter.propose(3, Sampling(1.0))
    assert fed == [], "both rows repeat themselves: no forward at all"
    assert out.probs is None
    assert out.tokens.tolist() == [[3, 4, 1]] * 2
    assert drafter.matches == [2, 2]
    drafter.observe(Outcome(torch.tensor([2, 0]), torch.tensor([30, 31])))
    out = drafter.propose(2, Sampling(1.0))
    assert fed == [[4, 2], [1, 1]], "and what was said for them is fed once, when the model speaks next"
    assert drafter.drafter._lm.lengths.tolist() == [5 + 4 + 1, 5 + 2 + 1]

    begin(drafter, [repeat, fresh])
    drafter.read()
    fed.clear()
    out = drafter.propose(3, Sampling(1.0), torch.Generator().manual_seed(0))
    assert fed == [[0, 1]] * 3
    assert out.n.tolist() == [3, 3]
    assert drafter.matches == [2, 0]
    assert out.probs is not None
    assert out.probs[0].tolist() == torch.nn.functional.one_hot(torch.tensor([3, 4, 1]), 61).float().tolist()
    assert bool((out.probs[1].max(-1).values < 1).all()), "the other row's law is the model's"
    assert torch.allclose(out.probs.sum(-1), torch.ones(2, 3))
    drafter.observe(Outcome(torch.tensor([3, 0]), torch.tensor([2, 40])))
    fed.clear()
    columns.clear()
    drafter.propose(1, Sampling())
    assert drafter.matches == [6, 0]
    assert (fed, columns) == ([[0, 1]], [1]), "what waits for the first row makes the second one's call no wider"
    drafter.observe(Outcome(torch.tensor([0, 0]), torch.tensor([3, 4])))
    assert drafter.propose(0, Sampling()).n.tolist() == [0, 0]


def test_one_rows_draft_cache_holds_its_live_tokens_and_nothing_else() -> None:
    drafter = combined(noisy(TARGET), 1)
    generate(TARGET, [PROMPTS[2]], drafter, k=3, max_new_tokens=60)
    assert bool(drafter.drafter._lm.live.all())


def test_a_paused_row_is_left_to_any_match() -> None:
    narrow = tiny("llama", 3, vocab_size=40)
    drafter = CombinedDrafter(NgramDrafter(least=0.0), ModelDrafter(narrow), min_match=3)
    begin(drafter, [[50, 51, 8, 50], [10, 11, 8, 10]])
    assert drafter.evidence() == [1, 0]
    out = drafter.propose(2, Sampling(1.0), torch.Generator().manual_seed(0))
    assert out.tokens[0].tolist() == [51, 8]
    assert out.probs is not None
    assert out.probs.shape == (2, 2, 52), "the lookup may repeat an id that the draft has not"
    assert out.probs[0].argmax(-1).tolist() == [51, 8]
    text = generate(TARGET, [[50, 51, 8, 50], [10, 11, 8, 10]], drafter, k=3, max_new_tokens=20)
    assert text.tokens == [plain_greedy(TARGET, prompt, 20) for prompt in ([50, 51, 8, 50], [10, 11, 8, 10])]


def test_a_pace_may_have_the_lookup_alone_or_the_model_alone() -> None:
    model = noisy(TARGET)
    drafter = combined(model, 5)
    history = [[9, 3, 4, 8, 3, 4]]  # a match of two, shorter than five
    begin(drafter, history)
    assert drafter.ways() == [[0], [2], [0]]
    with mock.patch.object(drafter.drafter, "_feed", side_effect=AssertionError("the model was asked")):
        drafter.choose(1)
        assert drafter.propose(1, Sampling()).tokens.tolist() == [[8]]
        drafter.observe(Outcome(torch.tensor([1]), torch.tensor([3])))
    drafter.choose(2)
    own = ModelDrafter(model)
    begin(own, [[9, 3, 4, 8, 3, 4, 8, 3]])
    assert drafter.propose(3, Sampling()).tokens.tolist() == own.propose(3, Sampling()).tokens.tolist()
    assert drafter.matches == [0]


def test_an_adaptive_pace_drafts_by_short_matches_where_the_model_does_not_pay() -> None:
    """A model that costs more than the target, and a lookup whose matches are shorter than `min_match`."""
    drafter = combined(noisy(TARGET), 100)
    pace = Adaptive(k_max=2)
    plain, said = 1.0, []
    for _ in range(80):
        k, way = pace.choose([[0], [2], [0]])
        said.append((k, way))
        by_model = way != 1
        pace.observe(Round(k, k + 1, [k], [0 if by_model else k], [0 if by_model else 2], 3.0 * k if by_model else 0.0, plain))
    assert said[-1] == (2, 1)
    assert [way for k, way in said if k].count(1) > 40
    text = generate(TARGET, [PROMPTS[0]], drafter, max_new_tokens=40, pace=pace)
    assert text.tokens == [plain_greedy(TARGET, PROMPTS[0], 40)]


def test_settings_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match="min_match=0"):
        CombinedDrafter(NgramDrafter(), ModelDrafter(TARGET), 0)
