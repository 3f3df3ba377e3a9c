"""Processors see what plain decoding shows them and remember no refused draft; log-probabilities; padding ids; callbacks."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from draftsmith.specdec import EarlyExitDrafter, ModelDrafter, NgramDrafter, Sampling, generate
from draftsmith.specdec.decode import Written
from tiny import noisy, plain_greedy, tiny

PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25]]
TARGET = tiny("llama")


def drafters() -> dict[str, Any]:
    return {"plain": None, "model": ModelDrafter(noisy(TARGET)), "ngram": NgramDrafter(), "exit": EarlyExitDrafter(TARGET, 2)}


class Counting:
    """Presence and frequency penalties from its own memory, one call a token: what a refused draft would leave behind shows."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        self.seen[int(ids[0, -1])] += 1
        scores = scores.clone()
        for token, count in self.seen.items():
            scores[0, token] -= 0.7 * count + 0.01 * self.calls
        return scores


def by_hand(prompt: list[int], processors: list[Any], n: int) -> list[int]:
    """One token at a time without a cache, the processors called as transformers calls them."""
    ids, processors = list(prompt), copy.deepcopy(processors)
    with torch.no_grad():
        for _ in range(n):
            scores = TARGET(input_ids=torch.tensor([ids])).logits[:, -1].float()
            for one in processors:
                scores = one(torch.tensor([ids]), scores)
            ids.append(int(scores[0].argmax()))
    return ids[len(prompt) :]


PROCESSORS: dict[str, list[Any]] = {
    "repetition": [RepetitionPenaltyLogitsProcessor(1.4)],
    "no repeats": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]),
    "bad words": [NoBadWordsLogitsProcessor([[36], [14, 14], [26, 26, 26]], eos_token_id=2)],
    "stateful": [Counting()],
    "together": [RepetitionPenaltyLogitsProcessor(1.2), Counting(), NoRepeatNGramLogitsProcessor(3)],
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processed_text_equals_the_plain_loops(name: str) -> None:
    processors = PROCESSORS[name]
    wanted = [by_hand(prompt, processors, 24) for prompt in PROMPTS]
    assert wanted != [plain_greedy(TARGET, prompt, 24) for prompt in PROMPTS], "the processors must matter"
    for (who, drafter), k in itertools.product(drafters().items(), (1, 4)):
        out = generate(TARGET, PROMPTS, drafter, k=k, max_new_tokens=24, processors=processors)
        assert out.tokens == wanted, (who, k)
        assert out.settings["processors"] == [type(one).__name__ for one in processors]
        assert all(one.calls == 0 for one in processors if isinstance(one, Counting)), "the caller's object stays as it was"


def test_processed_text_equals_transformers() -> None:
    ids = torch.tensor([PROMPTS[0]])
    theirs = TARGET.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=[59, 60],
        repetition_penalty=1.4, no_repeat_ngram_size=3, min_new_tokens=24,
    )  # fmt: skip
    processors = [
        RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(3), MinNewTokensLengthLogitsProcessor(5, 24, [59, 60]),
    ]  # fmt: skip
    for drafter in drafters().values():
        out = generate(TARGET, [PROMPTS[0]], drafter, k=4, max_new_tokens=24, processors=processors)
        assert out.tokens[0] == theirs[0, 5:].tolist()


def test_a_processor_that_cannot_be_undone_is_refused() -> None:
    class Guided:
        def __init__(self) -> None:
            self.model = nn.Linear(1, 1)

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    class Uncopied(Counting):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a socket")

    class Forbidding:
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf)

    for one, message in ((Guided(), "a model of its own"), (Uncopied(), "could not forget"), (Forbidding(), "no token at all")):
        with pytest.raises(ValueError, match=message):
            generate(TARGET, [PROMPTS[0]], NgramDrafter(), max_new_tokens=9, processors=[one])


def test_rows_that_end_early_take_their_processors_and_drafts_with_them() -> None:
    """Rows leave the batch at different times; what is left behind must still belong to the row that it belonged to."""
    whole = [by_hand(prompt, [Counting()], 24) for prompt in PROMPTS]
    lengths = set()
    for eos in range(61):
        wanted = [row[: row.index(eos) + 1] if eos in row else row for row in whole]
        if len({len(row) for row in wanted}) < 2 or tuple(map(len, wanted)) in lengths or len(lengths) == 4:
            continue
        lengths.add(tuple(map(len, wanted)))
        for who, drafter in drafters().items():
            out = generate(TARGET, PROMPTS, drafter, k=3, max_new_tokens=24, processors=[Counting()], eos=eos)
            assert out.tokens == wanted, (who, eos)
    assert len(lengths) > 3


def test_finished_rows_cost_no_more_forwards() -> None:
    widths: list[int] = []
    handle = TARGET.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        text = plain_greedy(TARGET, PROMPTS[0], 30)
        del widths[:]
        for drafter in drafters().values():
            out = generate(TARGET, PROMPTS, drafter, k=3, max_new_tokens=30, eos=text[0])
            assert len(out.tokens[0]) == 1
    finally:
        handle.remove()
    assert {1, 2} & set(widths), "a batch that has lost a row is smaller"


def test_log_probabilities_are_the_targets_own_one_a_token() -> None:
    for (name, drafter), how in itertools.product(drafters().items(), (Sampling(), Sampling(0.8, top_k=9))):
        out = generate(TARGET, PROMPTS, drafter, k=4, max_new_tokens=20, how=how, eos=11, logprobs=True)
        assert out.logprobs is not None
        for prompt, tokens, said in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
            with torch.no_grad():
                logits = TARGET(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            assert len(said) == len(tokens), name
            assert torch.allclose(torch.tensor(said), wanted, atol=1e-3), name
    assert generate(TARGET, PROMPTS, max_new_tokens=2).logprobs is None


def test_rows_that_pad_the_head_are_never_said() -> None:
    target, draft = tiny("llama", 0, vocab_size=64), tiny("llama", 0, vocab_size=80)
    with torch.no_grad():
        target.lm_head.weight[61:] = 50 * target.lm_head.weight[:3]  # untrained rows may say anything
    real = copy.deepcopy(target)
    real.lm_head.weight.data[61:] = 0
    for how in (Sampling(), Sampling(1.0)):
        for drafter in (None, ModelDrafter(draft, vocab_size=61), NgramDrafter()):
            out = generate(target, PROMPTS, drafter, k=3, max_new_tokens=20, how=how, vocab_size=61, logprobs=True)
            assert max(map(max, out.tokens)) < 61
            assert out.settings["vocabulary"] == 61
            assert all(chance < 1e-6 for row in out.logprobs or [] for chance in row)
    assert any(max(row) > 60 for row in generate(target, PROMPTS, max_new_tokens=20).tokens), "without it they were said"


def test_the_callback_hears_every_token_once_and_who_wrote_it() -> None:
    for name, drafter in drafters().items():
        heard: list[Written] = []
        out = generate(TARGET, PROMPTS, drafter, k=4, max_new_tokens=20, eos=11, on_tokens=heard.append)
        for row, tokens in enumerate(out.tokens):
            mine = [one for one in heard if one.row == row]
            assert [token for one in mine for token in one.tokens] == tokens
            assert [len(one.tokens) - 1 for one in mine] == [accepted for _, accepted in out.rounds[row]], name
            assert all(one.accepted in (len(one.tokens) - 1, len(one.tokens)) for one in mine)


def test_the_result_says_what_a_generation_config_asked_for_in_vain() -> None:
    target = copy.deepcopy(TARGET)
    target.generation_config.update(do_sample=True, temperature=0.6, repetition_penalty=1.2)
    out = generate(target, [PROMPTS[0]], max_new_tokens=3)
    assert out.settings["generation_config_ignored"] == {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.2}
    assert generate(TARGET, [PROMPTS[0]], max_new_tokens=3).settings["generation_config_ignored"] == {}


class Grammar:
    """Allows ids of one parity, and raises where it is shown a text that it has not allowed."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if any(token % 2 for token in ids[0, 8:].tolist()):
            raise RuntimeError("not in the grammar")
        odd = torch.arange(scores.shape[-1]) % 2 == 1
        return scores.masked_fill(odd, -torch.inf)


@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0)])
def test_a_grammar_is_never_shown_a_text_that_it_forbade(how: Sampling) -> None:
    for name, drafter in drafters().items():
        for rule in ("token", "block"):
            out = generate(TARGET, [PROMPTS[2]], drafter, k=4, max_new_tokens=20, how=how, processors=[Grammar()], verify=rule)
            assert all(token % 2 == 0 for token in out.tokens[0]), name
            if how.temperature == 0:
                assert out.tokens == generate(TARGET, [PROMPTS[2]], max_new_tokens=20, processors=[Grammar()]).tokens, name


def test_two_processors_that_share_their_memory_keep_sharing_it() -> None:
    shared: Counter[int] = Counter()

    class Half(Counting):
        def __init__(self) -> None:
            self.seen, self.calls = shared, 0

    wanted = by_hand(PROMPTS[0], [Half(), Half()], 20)
    for name, drafter in drafters().items():
        assert generate(TARGET, [PROMPTS[0]], drafter, k=4, max_new_tokens=20, processors=[Half(), Half()]).tokens == [wanted], name


@pytest.mark.parametrize("wrong", [lambda scores: scores[0], lambda scores: scores[:, :1], lambda scores: None])
def test_what_a_processor_gives_back_is_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match="must give scores"):
        generate(TARGET, [PROMPTS[0]], max_new_tokens=3, processors=[lambda ids, scores: wrong(scores)])


def test_a_processor_cannot_bring_back_ids_that_are_none() -> None:
    def love_60(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores).index_fill(1, torch.tensor([60]), 9.0)

    assert max(generate(TARGET, [PROMPTS[0]], max_new_tokens=5, processors=[love_60], vocab_size=40).tokens[0]) < 40


def test_constraints_that_ask_for_their_row_are_refused_in_a_batch() -> None:
    from transformers import PrefixConstrainedLogitsProcessor

    one = PrefixConstrainedLogitsProcessor(lambda row, ids: [4, 5, 6], 1)
    assert set(generate(TARGET, PROMPTS[:1], NgramDrafter(), max_new_tokens=9, processors=[one]).tokens[0]) <= {4, 5, 6}
    with pytest.raises(ValueError, match="number of its row"):
        generate(TARGET, PROMPTS, max_new_tokens=9, processors=[one])
