"""Growing text against a slow reference that decodes everything after every token, over random text, bytes and chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draftsmith.specdec.text import WINDOW, Detokenizer, StopStrings
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LETTERS = ["a", "t", "h", " ", "\n", "é", "你", "😀", "\ufffd", "<s>", "</s>", "<|endoftext|>"]
HALF = "\ufffd"


def sentencepiece() -> Any:
    """Words with a leading-space mark and bytes for the rest, decoded as llama's tokenizer does: the text's first space is dropped."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "▁the", "▁a", "th", "a", "▁", "▁▁", ".", "é"]
    raw = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}, merges=[]))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SENTENCEPIECE = sentencepiece()


def decoded(ids: list[int], skip: bool = False, tokenizer: Any = TOKENIZER) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip) if ids else ""


def output(prompt: list[int], tokens: list[int], tokenizer: Any = TOKENIZER, skip: bool = False) -> str:
    return decoded([*prompt, *tokens], skip, tokenizer)[len(decoded(prompt, skip, tokenizer)) :]


def random_tokens(chance: random.Random, length: int, garbage: float) -> list[int]:
    """Text of many widths, encoded byte by byte, some of the bytes lost or foreign."""
    ids = list(TOKENIZER("".join(chance.choice(LETTERS) for _ in range(length))).input_ids)
    return [chance.randrange(len(TOKENIZER)) if chance.random() < garbage else one for one in ids if chance.random() >= garbage / 2]


def random_pieces(chance: random.Random, length: int) -> list[int]:
    """Sentencepiece tokens: words, spaces, specials, and whole characters as runs of bytes."""
    ids: list[int] = []
    for _ in range(length):
        byte_run = [11 + byte for byte in chance.choice(["你", "😀", "é", "\n"]).encode()]
        ids += byte_run if chance.random() < 0.4 else [chance.randrange(11)]
    return ids


def chunks(chance: random.Random, tokens: list[int], most: int = 5) -> list[list[int]]:
    parts, at = [], 0
    while at < len(tokens):
        size = chance.randint(0, most)
        parts.append(tokens[at : at + size])
        at += size
    return parts


def whole_characters(prompt: list[int], chance: random.Random) -> list[int]:
    """A prompt whose text does not end within a character; that case has a test of its own."""
    return prompt if not decoded(prompt).endswith(HALF) else [*prompt, *TOKENIZER("a").input_ids]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("garbage", [0.0, 0.2, 1.0])
def test_the_pieces_are_the_decoded_text(garbage: float, skip: bool) -> None:
    for trial in range(25):
        chance = random.Random(f"{trial}{garbage}{skip}")
        prompt = whole_characters(random_tokens(chance, chance.choice([0, 2, 40]), garbage), chance)
        tokens = random_tokens(chance, chance.choice([3, 30, 90]), garbage)
        text, grown = Detokenizer(TOKENIZER, prompt, skip), ""
        whole = output(prompt, tokens, skip=skip)
        for part in chunks(chance, tokens):
            grown += text.push(part)
            assert whole.startswith(grown)  # nothing is ever taken back
        assert grown + text.flush() == whole
        assert text.flush() == ""


@pytest.mark.parametrize("skip", [False, True])
def test_leading_spaces_and_runs_of_bytes_of_sentencepiece(skip: bool) -> None:
    for trial in range(25):
        chance = random.Random(trial)
        prompt, tokens = random_pieces(chance, chance.choice([0, 1, 5, 40])), random_pieces(chance, chance.choice([2, 60]))
        text = Detokenizer(SENTENCEPIECE, prompt, skip)
        grown = "".join(text.push(part) for part in chunks(chance, tokens)) + text.flush()
        assert grown == output(prompt, tokens, SENTENCEPIECE, skip)


def test_the_first_word_keeps_its_space_behind_a_prompt_of_any_end() -> None:
    the, bos = 3, 1
    for prompt, wanted in (([the], " the"), ([the, *[bos] * 20], " the"), ([], "the"), ([bos], "the")):
        assert Detokenizer(SENTENCEPIECE, prompt, skip_special=True).push([the]) == wanted


def test_a_character_waits_for_its_last_byte_and_what_precedes_it_does_not() -> None:
    text = Detokenizer(TOKENIZER)
    ids = TOKENIZER("x😀y").input_ids
    assert [text.push([one]) for one in ids] == ["x", "", "", "", "😀", "y"]
    assert text.push(TOKENIZER("😀").input_ids[:2]) == ""
    assert text.flush() == HALF


def test_a_character_that_the_prompt_began_is_the_outputs() -> None:
    ids = TOKENIZER("a你b").input_ids
    text = Detokenizer(TOKENIZER, ids[:2])
    assert [text.push([one]) for one in ids[2:]] == ["", "你", "b"]
    text = Detokenizer(TOKENIZER, ids[:2])  # the character never comes, so the prompt keeps its broken byte
    assert text.push(TOKENIZER("b").input_ids) + text.flush() == "b"


@pytest.mark.parametrize("garbage", [False, True])
def test_a_token_costs_the_same_however_long_the_text_is(garbage: bool) -> None:
    class Counting:
        most = total = 0

        def decode(self, ids: list[int], **how: Any) -> str:
            self.most, self.total = max(self.most, len(ids)), self.total + len(ids)
            return TOKENIZER.decode(ids, **how)

    counting, chance = Counting(), random.Random(1)
    ids = TOKENIZER("😀你" * 400).input_ids if not garbage else [TOKENIZER("é").input_ids[1]] * 2800
    text = Detokenizer(counting, ids)
    grown = "".join(text.push(part) for part in chunks(chance, ids)) + text.flush()
    assert len(grown) == (800 if not garbage else 2800)
    assert counting.total <= len(ids) * (2 * WINDOW if not garbage else 8 * WINDOW)


def slow_first(tokens: list[int], strings: list[str], prompt: list[int], least: int, tokenizer: Any) -> tuple[int, str] | None:
    """Decode all of the output after every token, without the bytes at its end that may still become a character, and look."""
    seen, dirty = 0, 0
    for count in range(1, len(tokens) + 1):
        text = output(prompt, tokens[:count], tokenizer)
        firm = text.rstrip(HALF)
        dirty = dirty + 1 if firm != text else 0
        sure = max(len(firm), len(text) - 3) if dirty > 3 else len(firm)
        text, before, seen = text[: max(sure, seen)], seen, max(sure, seen)
        found = [
            (at, -len(one), one)
            for one in strings
            for at in range(len(text) - len(one) + 1)
            if text[at : at + len(one)] == one and at + len(one) > before
        ]
        if found and count >= least:
            return count - 1, min(found)[2]
    return None


def asked(stop: StopStrings, parts: list[list[int]], least: int) -> tuple[int, str] | None:
    done = 0
    for part in parts:
        if answer := stop.first(part, least):
            return done + answer[0], answer[1]
        done += len(part)
    return None


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_stop_strings_are_found_where_the_slow_reference_finds_them(kind: str) -> None:
    answers: list[str | None] = []
    for trial in range(120):
        chance = random.Random(f"{kind}{trial}")
        tokenizer = TOKENIZER if kind == "bytes" else SENTENCEPIECE
        if kind == "bytes":
            garbage = chance.choice([0.0, 0.1])
            prompt, tokens = whole_characters(random_tokens(chance, 6, garbage), chance), random_tokens(chance, 60, garbage)
        else:
            prompt, tokens = random_pieces(chance, 6), random_pieces(chance, 60)
        text = output(prompt, tokens, tokenizer).replace(HALF, "")
        strings = ["".join(chance.choice(LETTERS[:8]) for _ in range(chance.randint(1, 3))) for _ in range(chance.randint(1, 4))]
        if text and chance.random() < 0.7:  # a part of the text, beside another or others
            at = chance.randrange(len(text))
            strings = [*strings[: chance.choice([0, 4])], text[at : at + chance.choice([2, 5, 30])]]
        least = chance.choice([0, 0, 1, 20, 200])
        wanted = slow_first(tokens, strings, prompt, least, tokenizer)
        assert asked(StopStrings(tokenizer, strings, prompt), chunks(chance, tokens), least) == wanted
        answers.append(wanted and wanted[1])
    assert None in answers
    assert len({one for one in answers if one and len(one) > 3}) > 5  # it is no test if nothing long is ever found


def test_special_tokens_have_text_and_the_prompt_has_none() -> None:
    ends = TOKENIZER("th</s>").input_ids
    assert StopStrings(TOKENIZER, ["h</s>"]).first(ends) == (1, "h</s>")
    assert StopStrings(TOKENIZER, ["a</s>"], TOKENIZER("a").input_ids).first([ends[-1]]) is None


def test_of_strings_that_one_token_completes_the_first_then_the_longest_counts() -> None:
    ids = TOKENIZER("xth").input_ids
    assert len(ids) == 2
    assert StopStrings(TOKENIZER, ["t", "h", "th"]).first(ids) == (1, "th")
    assert StopStrings(TOKENIZER, ["h", "t"]).first(ids) == (1, "t")


def test_a_string_passed_over_is_not_found_again() -> None:
    stop = StopStrings(TOKENIZER, ["ab", "b"])
    assert stop.first(TOKENIZER("ab").input_ids, least=3) is None
    assert stop.first(TOKENIZER("c").input_ids, least=3) is None
    assert stop.first(TOKENIZER("ab").input_ids, least=3) == (1, "ab")


def test_what_cannot_be_looked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character, found ''"):
        StopStrings(TOKENIZER, ["a", ""])
    with pytest.raises(ValueError, match="need the target's tokenizer"):
        StopStrings(None, ["a"])
