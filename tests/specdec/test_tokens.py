"""Tokens as bytes, in both ways of writing them, and the special tokens by what they do."""

from __future__ import annotations

import pytest
from tokenizers import models

from draftsmith.specdec.tokens import control_ids, end_of_turn, kind, specials, speller, token_bytes
from tiny import tiny_tokenizer
from vocabularies import byte_level, sentencepiece

BYTES = byte_level(["t h", "th e", "Ġ the"])
PIECES = sentencepiece(["t h", "th e", "▁ the"])


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES, tiny_tokenizer()])
def test_the_bytes_of_a_texts_tokens_are_the_text(tokenizer: object) -> None:
    meant = token_bytes(tokenizer)
    for text in ("the theme is 42.", "é\n\tö 日本", "<note>x", " a  b"):
        ids = [one for one in tokenizer(text).input_ids if one in meant]  # type: ignore[operator]
        assert b"".join(meant[one] for one in ids).decode() in (text, " " + text)
    assert len(set(meant) & control_ids(tokenizer)) == 0


def test_the_kinds_are_told_apart() -> None:
    assert [kind(one) for one in (BYTES, PIECES, tiny_tokenizer(), object())] == [
        "byte-level",
        "sentencepiece",
        "byte-level",
        "other",
    ]
    with pytest.raises(ValueError, match=r"not known here \(other\)"):
        token_bytes(object())


def test_bytes_are_spelled_in_the_middle_of_a_text() -> None:
    """No BOS, no space before, no unknown letter passed over in silence, characters in parts."""
    names = PIECES.convert_ids_to_tokens
    spell = speller(PIECES)
    assert names(spell(b"the")) == ["the"]
    assert names(spell(b" the")) == ["▁the"]
    assert names(spell(b"thx")) == ["th", "x"]
    assert names(spell("ö".encode())) == ["<0xC3>", "<0xB6>"]
    assert names(spell("日".encode()[:2])) == ["<0xE6>", "<0x97>"]
    assert names(spell(b"\n")) == ["<0x0A>"]
    assert speller(BYTES)("日 the".encode()) == BYTES("日 the").input_ids
    gap = byte_level([])
    gap.backend_tokenizer.model = models.BPE(vocab={"a": 7}, merges=[])
    assert speller(gap)(b"a") == [7]
    assert speller(gap)(b"ab") == [], "a BPE passes over a letter that it has not, in silence"


def test_special_tokens_by_role() -> None:
    assert specials(BYTES)["end of turn"] == (2, "<end>")
    assert specials(BYTES)["pad"] == (0, "<pad>")
    assert "unk" not in specials(BYTES)
    assert list(specials(PIECES)) == ["eos", "bos", "unk"]
    assert end_of_turn(PIECES) is None
    open_end = byte_level([], template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert end_of_turn(open_end) is None
    refuses = byte_level([], template="{{ raise_exception('no') }}")
    assert end_of_turn(refuses) is None
    assert end_of_turn(tiny_tokenizer()) == 2
