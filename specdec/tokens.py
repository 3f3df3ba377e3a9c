"""What a token stands for, however its tokenizer writes it: bytes of text, or a role (an end, a beginning) that has no text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jinja2 import TemplateError

PLAIN = (*range(33, 127), *range(161, 173), *range(174, 256))
# GPT-2's alphabet: printable bytes are their own letters, the other 68 take those from U+0100 on, in order.
LETTER = {byte: chr(byte) for byte in PLAIN} | {byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - set(PLAIN)))}
BYTE = {letter: byte for byte, letter in LETTER.items()}
RAW = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece writes a byte that is no character of its own
ROLES = ("end of turn", "eos", "bos", "pad", "unk")


class Special(NamedTuple):
    """A special token by its id and its name."""

    id: int
    token: str


def kind(tokenizer: Any) -> str:
    """How its tokens are written: `byte-level` (GPT-2's alphabet), `sentencepiece` (▁ for a space, <0x0A> for a byte),
    `wordpiece`, or `other`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [getattr(backend, name, None) for name in ("decoder", "pre_tokenizer", "normalizer")]
    said = "".join(part.__getstate__().decode() for part in parts if part is not None)
    for mark, name in (
        ("ByteLevel", "byte-level"),
        ("Metaspace", "sentencepiece"),
        ("▁", "sentencepiece"),
        ("WordPiece", "wordpiece"),
    ):
        if mark in said:
            return name
    return "other"


def control_ids(tokenizer: Any) -> set[int]:
    """The ids that stand for no text."""
    return {*tokenizer.all_special_ids, *(i for i, one in tokenizer.added_tokens_decoder.items() if one.special)}


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """{id: the bytes of text that it stands for}; control tokens have none and are left out."""
    read = _reader(tokenizer)
    added, control = tokenizer.added_tokens_decoder, control_ids(tokenizer)
    known = {}
    for token, i in tokenizer.get_vocab().items():
        meant = added[i].content.encode() if i in added else read(token)  # an added token is written as it is meant
        if i not in control and meant is not None:
            known[i] = meant
    return known


def speller(tokenizer: Any) -> Callable[[bytes], list[int]]:
    """What writes bytes as ids of this tokenizer in the middle of a text: no BOS, no space put before, no split into words.

    It gives [] where the tokenizer cannot write them.
    """
    _reader(tokenizer)
    model, vocabulary, known = tokenizer.backend_tokenizer.model, tokenizer.get_vocab(), token_bytes(tokenizer)
    by_letters = kind(tokenizer) == "byte-level"

    def spell(text: bytes) -> list[int]:
        try:
            letters = "".join(LETTER[byte] for byte in text) if by_letters else text.decode().replace(" ", "▁")
            ids = [one.id for one in model.tokenize(letters)]
        except UnicodeDecodeError:  # a part of a character, which sentencepiece writes byte by byte
            ids = [vocabulary.get(f"<0x{byte:02X}>", -1) for byte in text]
        # A letter that a BPE does not have is left out in silence, or becomes `unk`.
        return ids if b"".join(known.get(one, b"?") for one in ids) == text else []

    return spell


def specials(tokenizer: Any) -> dict[str, Special]:
    """{role: the token that plays it}, for the roles that are filled."""
    found = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ROLES[1:]} | {"end of turn": end_of_turn(tokenizer)}
    return {name: Special(int(i), str(tokenizer.convert_ids_to_tokens(int(i)))) for name in ROLES if (i := found[name]) is not None}


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that closes an assistant's turn in the chat template; None without a template, or where none closes it."""
    if not tokenizer.chat_template:
        return None
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    try:
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    except TemplateError:
        return None
    while ids and not tokenizer.decode(ids[-1:]).strip():  # a newline behind it
        ids = ids[:-1]
    return ids[-1] if ids and ids[-1] in control_ids(tokenizer) else None


def _reader(tokenizer: Any) -> Callable[[str], bytes | None]:
    how = kind(tokenizer)
    readers: dict[str, Callable[[str], bytes | None]] = {"byte-level": _letters, "sentencepiece": _pieces}
    if how not in readers:
        raise ValueError(
            f"{type(tokenizer).__name__} writes its tokens in a way that is not known here ({how}); {' and '.join(readers)} are. "
            "A fast tokenizer (tokenizer.json) is needed"
        )
    return readers[how]


def _letters(token: str) -> bytes | None:
    return bytes(BYTE[letter] for letter in token) if all(letter in BYTE for letter in token) else None


def _pieces(token: str) -> bytes:
    raw = RAW.fullmatch(token)
    return bytes([int(raw[1], 16)]) if raw else token.replace("▁", " ").encode()
