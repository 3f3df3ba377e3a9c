"""A sentencepiece tokenizer as llama.cpp reads it: it keeps a score a token and no merges, so merges that no scores could give are refused."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

SPACE = "▁"
LAST = -1e9  # of what no merge makes: single characters, bytes, roles


class Pieces(NamedTuple):
    """A score for each text; whether a space is put before a text; and which texts llama.cpp will read otherwise."""

    scores: list[float]
    prefix: bool
    notes: list[str]


def pieces(whole: dict[str, Any], texts: list[str]) -> Pieces:
    """What a .gguf says of tokenizer.json, whose ids stand for `texts`; ValueError where llama.cpp would merge otherwise."""
    own = whole["model"]["vocab"]
    if lacking := [one for one in (f"<0x{byte:02X}>" for byte in range(256)) if one not in own]:
        raise ValueError(
            f"the tokenizer has no token for {len(lacking)} bytes ({lacking[0]} for one), with which llama.cpp writes what it cannot"
        )
    scheme, keeps = _spaces(whole)
    notes = {
        "always": [],
        "first": ["llama.cpp puts a space before a text that follows a special token, transformers before the first text only"],
        "never": [],
    }[scheme]
    if scheme != "never" and not keeps:
        notes = [*notes, "llama.cpp puts a space before a text that begins with one too, transformers does not"]
    found = _scores([tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one) for one in whole["model"]["merges"]], own)
    return Pieces([found.get(text, LAST) for text in texts], scheme != "never", notes)


def _spaces(whole: dict[str, Any]) -> tuple[str, bool]:
    """Where a space is put before a text (always, first, never), and whether even before one that begins with a space."""
    normalizer, first = whole["normalizer"] or {}, whole["pre_tokenizer"] or {}
    steps = [
        {key: value for key, value in one.items() if value}
        for one in normalizer.get("normalizers", [normalizer] if normalizer else [])
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not first and steps == [{"type": "Prepend", "prepend": SPACE}, replace]:
        return "always", True
    if not first and steps == [replace]:
        return "never", True
    if not steps and first.get("type") == "Metaspace" and first.get("replacement") == SPACE and not first.get("split", True):
        return str(first["prepend_scheme"]), False
    raise ValueError(
        f"the tokenizer treats its text by {json.dumps(normalizer)[:200]} and splits it by {json.dumps(first)[:200]}; llama.cpp writes spaces as {SPACE}, "
        "may put one before a text, and does nothing else to it"
    )


def _scores(merges: list[Any], own: dict[str, int]) -> dict[str, float]:
    """{text: its score}: the earlier a text is made, the higher. llama.cpp makes a text of any two tokens that spell it, so the merges must name
    all of those, and those of one text one after the other, as merges that came from scores do."""
    made: dict[str, dict[tuple[str, str], int]] = {}
    for rank, (left, right) in enumerate(merges):
        made.setdefault(left + right, {})[left, right] = rank
    scores: dict[str, float] = {}
    before = -1
    for number, (text, ranks) in enumerate(made.items()):
        if min(ranks.values()) < before or text not in own:
            raise ValueError(
                f"the tokenizer's merges make {text!r} at places apart, which no score could say; llama.cpp keeps scores, not merges"
            )
        before = max(ranks.values())
        scores[text] = -float(number + 1)
    for text in own:
        splits = {(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in own and text[at:] in own}
        if missing := splits - made.get(text, {}).keys():
            left, right = sorted(missing)[0]
            raise ValueError(
                f"the tokenizer never merges {left!r} and {right!r}, though {text!r} is a token; llama.cpp would. It is not one that came from "
                "sentencepiece"
            )
    return scores
