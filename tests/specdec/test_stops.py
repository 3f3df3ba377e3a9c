"""Stop strings in the decoder: the text ends where plain decoding's would, in every row, among EOS and least lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from draftsmith.specdec import ModelDrafter, NgramDrafter, Proposal, generate
from tiny import noisy, tiny, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TARGET = tiny("llama", 3, vocab_size=260)
PROMPTS = [list(b"stop "), list(b"go"), list(b"one two three")]
VARIED: dict[str, Any] = {
    "processors": [RepetitionPenaltyLogitsProcessor(3.0)],
    "tokenizer": TOKENIZER,
}  # a tiny model repeats itself
TEXTS = generate(TARGET, PROMPTS, max_new_tokens=30, **VARIED).tokens


def drafters() -> dict[str, Any]:
    return {"plain": None, "model": ModelDrafter(noisy(TARGET)), "self": ModelDrafter(TARGET), "ngram": NgramDrafter()}


def cut(tokens: list[int], strings: list[str], eos: int | None = None, least: int = 0) -> tuple[list[int], str]:
    """By decoding the whole text after every token."""
    before = ""
    for i, token in enumerate(tokens, 1):
        if token == eos:
            return tokens[:i], "eos"
        text = TOKENIZER.decode(tokens[:i])
        new = [one for one in strings if text.find(one, max(0, len(before) - len(one) + 1)) >= 0]
        whole = not text.endswith("\ufffd")
        if new and whole and i >= least:
            return tokens[:i], f"stop: {min(new, key=lambda one: (text.find(one), -len(one)))}"
        before = text if whole else before
    return tokens, "length"


def pieces(tokens: list[int], place: int, length: int) -> str | None:
    """Text of some tokens in the middle, if it is whole characters that occur there first."""
    text = TOKENIZER.decode(tokens[place : place + length])
    return None if "\ufffd" in text or not text else text


def test_every_stretch_of_the_text_declared_a_stop_string_ends_it_there() -> None:
    tried = 0
    for place in range(0, 28, 3):
        for length in (1, 2, 5):
            string = pieces(TEXTS[0], place, length)
            if string is None:
                continue
            tried += 1
            wanted = [cut(text, [string, "never said"]) for text in TEXTS]
            for who, drafter in drafters().items():
                out = generate(TARGET, PROMPTS, drafter, k=4, max_new_tokens=30, stop_strings=[string, "never said"], **VARIED)
                assert out.tokens == [tokens for tokens, _ in wanted], (who, string)
                assert out.ends == [why for _, why in wanted], (who, string)
                assert all(len(row) == sum(a + 1 for _, a in rounds) for row, rounds in zip(out.tokens, out.rounds, strict=True))
    assert tried > 5


def test_rows_stop_apart_and_each_keeps_its_own_text() -> None:
    strings = [one for text in TEXTS for place in (4, 9) if (one := pieces(text, place, 2))]
    assert len(strings) > 2
    for string in strings:
        wanted = [cut(text, [string]) for text in TEXTS]
        for who, drafter in drafters().items():
            out = generate(TARGET, PROMPTS, drafter, k=3, max_new_tokens=30, stop_strings=string, **VARIED, logprobs=True)
            assert (out.tokens, out.ends) == ([tokens for tokens, _ in wanted], [why for _, why in wanted]), (who, string)
            assert [len(row) for row in out.logprobs or []] == [len(row) for row in out.tokens]


def test_a_row_that_leaves_takes_its_own_text_along() -> None:
    """The first row ends in the middle of the others' strings."""
    strings = [one for text, place, length in zip(TEXTS, (3, 4, 5), (2, 2, 4), strict=True) if (one := pieces(text, place, length))]
    assert len(strings) > 1
    wanted = [cut(text, strings) for text in TEXTS]
    assert len({len(tokens) for tokens, _ in wanted}) > 1
    for who, drafter in drafters().items():
        out = generate(TARGET, PROMPTS, drafter, k=1, max_new_tokens=30, stop_strings=strings, **VARIED)
        assert (out.tokens, out.ends) == ([tokens for tokens, _ in wanted], [why for _, why in wanted]), who


def test_eos_and_a_stop_string_in_one_block_and_a_least_length() -> None:
    text, tried = TEXTS[0], 0
    for eos_at, stop_at in ((4, 3), (3, 4), (3, 3), (6, 4)):
        eos, string = text[eos_at], TOKENIZER.decode([text[stop_at]])
        if "\ufffd" in string:
            continue
        tried += 1
        for least in (0, 6):
            for who, drafter in drafters().items():
                settings: dict[str, Any] = VARIED | {
                    "stop_strings": [string],
                    "tokenizer": TOKENIZER,
                    "min_new_tokens": least,
                    "max_new_tokens": 30,
                }
                out = generate(TARGET, PROMPTS, drafter, k=5, eos=eos, **settings)
                free = generate(TARGET, PROMPTS, None, max_new_tokens=30, min_new_tokens=least, eos=eos, **VARIED)
                wanted = [cut(row, [string], eos, least) for row in free.tokens]
                assert out.tokens == [tokens for tokens, _ in wanted], (who, eos_at, stop_at, least)
                assert out.ends == [why for _, why in wanted]
                assert out.finished == [why != "length" for _, why in wanted]
    assert tried


def test_a_stop_string_in_front_of_an_eos_in_one_accepted_block() -> None:
    class Told:
        hidden_layers: tuple[int, ...] = ()

        def begin(self, *_: Any) -> None:
            self.at = 1

        def propose(self, k: int, how: Any, generator: Any) -> Proposal:
            return Proposal(torch.tensor([TEXTS[0][self.at : self.at + k]]), None, torch.tensor([k]))

        def observe(self, outcome: Any) -> None:
            self.at += int(outcome.accepted) + 1

    string, eos = TOKENIZER.decode(TEXTS[0][3:4]), TEXTS[0][5]
    out = generate(TARGET, PROMPTS[:1], Told(), k=8, max_new_tokens=30, stop_strings=[string], eos=eos, **VARIED)
    assert (out.tokens, out.ends) == ([TEXTS[0][:4]], [f"stop: {string}"])
    assert out.rounds == [[(0, 0), (2, 2)]]


def test_a_stop_string_needs_a_tokenizer_and_text() -> None:
    with pytest.raises(ValueError, match="tokenizer="):
        generate(TARGET, PROMPTS, stop_strings=["x"])
    with pytest.raises(ValueError, match="at least one character"):
        generate(TARGET, PROMPTS, stop_strings=[""], tokenizer=TOKENIZER)
    assert torch.is_grad_enabled()
