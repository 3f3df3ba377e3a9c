"""Which candidates a picture shows, and as what: a drafter keeps its colour and its shape in every picture, whatever its k."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.eval.page.words import printable
from draftsmith.eval.reports import number, says_k

COLOURS = 6  # --s0 to --s5 of the style sheet
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # seven, so that colour and shape together repeat after 42 drafters
GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖"}
LONGEST = 24  # letters of a name in a picture; the tables have all of it


class Series(NamedTuple):
    """A drafter in a picture: its settings, and the fastest of them, which stands for it where a picture shows one."""

    label: str
    best: str
    settings: tuple[str, ...]
    place: int

    @property
    def marker(self) -> str:
        return MARKERS[self.place % len(MARKERS)]

    @property
    def colour(self) -> int:
        return self.place % COLOURS


def series(part: Mapping[str, Any]) -> list[Series]:
    """The drafters of a part, in the order in which they were asked for."""
    by: dict[str, list[str]] = {}
    for name, one in part["candidates"].items():
        by.setdefault(str(one.get("drafter") or name), []).append(name)
    return [
        Series(_family(names), max(names, key=lambda name: _speed(part["candidates"][name])), tuple(names), place)
        for place, names in enumerate(by.values())
    ]


def short(name: str) -> str:
    """A name for a drawing: in a line, of letters that SVG may hold."""
    name = " ".join(printable(name).split())
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def with_k(name: str, candidate: Mapping[str, Any]) -> str:
    """A candidate's name with its k, where the name does not say it."""
    k = str(candidate.get("k", ""))
    return name if not k or says_k(name, k) else f"{name}, k = {k}"


def _family(names: Sequence[str]) -> str:
    bare = [re.sub(r",?\s*(k\s*=\s*\w+|adaptive)$", "", name) or name for name in names]
    return bare[0] if len(names) > 1 else names[0]


def _speed(candidate: Mapping[str, Any]) -> float:
    speed = number(candidate, "all", "speed_up", "value")
    return -1.0 if speed is None else speed
