"""What stands around a drawing: its title, what it says to those who cannot see it, what it means, and who is who in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from draftsmith.eval.page.series import Series
from draftsmith.eval.page.svg import SERIES


class Picture(NamedTuple):
    """A drawing and its words; `legend` is (series, name) of what is in it."""

    key: str
    title: str
    figure: Figure
    alt: str
    caption: str
    legend: list[tuple[Series, str]]


def line(one: Series, **changes: Any) -> dict[str, Any]:
    """How matplotlib draws a series."""
    return {"color": SERIES[one.colour], "marker": one.marker, "markeredgewidth": 0, **changes}


def listed(words: Sequence[str]) -> str:
    return "; ".join(words)
