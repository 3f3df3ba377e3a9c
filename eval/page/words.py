"""Text from outside (prompts, names, answers) on its way into the page: none of it can become markup, and none of it is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
LONG = 280  # letters of a prompt; a longer one is folded


def together(text: str) -> str:
    """`text` in which no line ends within `k = 4`."""
    return text.replace(" = ", "\u00a0=\u00a0")


def printable(text: Any) -> str:
    return CONTROL.sub("\ufffd", str(text))


def escaped(text: Any) -> str:
    """`text` for an element or a quoted attribute; letters that a page may not hold are shown as U+FFFD."""
    return escape(printable(text))


def written(example: dict[str, Any]) -> str:
    """An answer in which what the draft wrote is tinted and underlined, for those who see no tint."""
    pieces: Sequence[Sequence[str]] = example.get("pieces") or []
    runs: list[list[str]] = []
    for text, who in pieces:
        if runs and runs[-1][1] == who:
            runs[-1][0] += text
        else:
            runs.append([text, who])
    drafted, whole = sum(len(text) for text, who in pieces if who == "draft"), sum(len(text) for text, _ in pieces)
    said = "".join(f'<span class="d">{escaped(text)}</span>' if who == "draft" else escaped(text) for text, who in runs)
    about = [f"<b>{escaped(example[what])}</b>" for what in ("kind", "candidate") if example.get(what)]
    if whole:
        about.append(f"{drafted / whole:.0%} of the letters are the draft's")
    return f'<article class="written"><p class="about">{" ".join(f"<span>{one}</span>" for one in about)}</p>{_asked(example)}<p class="text">{said}</p></article>'


def _asked(example: dict[str, Any]) -> str:
    prompt = str(example.get("asked") or example.get("prompt") or "")  # its text, of a report that holds it, or its name
    if len(prompt) <= LONG:
        return f'<p class="asked">{escaped(prompt)}</p>' if prompt else ""
    return f"<details><summary>{escaped(prompt[: LONG // 2])}…</summary>{escaped(prompt)}</details>"
