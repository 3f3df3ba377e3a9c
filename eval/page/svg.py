"""A matplotlib figure as SVG inside a page, in the page's own type and colours, so that one drawing does for light and dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from draftsmith.eval.page.words import escaped

WIDTH = 380  # points; shown at 330 to 540 pixels, so that its type is never under nine
# Colours that stand for variables of the style sheet, and that nothing else is drawn in.
INK, MUTED, LINE, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
SERIES = tuple(f"#1000{place:02x}" for place in range(6))
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    PAPER: "paper",
    **{colour: f"s{place}" for place, colour in enumerate(SERIES)},
}
STYLE: Any = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 11.5, "axes.titlesize": 11.5, "axes.labelsize": 11.5,
    "xtick.labelsize": 11, "ytick.labelsize": 11, "text.color": INK, "axes.labelcolor": MUTED, "axes.titlecolor": INK, "axes.edgecolor": LINE,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "grid.color": LINE, "grid.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.axisbelow": True, "axes.facecolor": "none",
    "figure.facecolor": "none", "savefig.facecolor": "none", "lines.linewidth": 1.8, "lines.markersize": 6.5,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib's settings while pictures are drawn and saved; the caller's own come back."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's own fonts will draw it
        yield


def sheet(height: float) -> Figure:
    """An empty figure of the page's width and `height` points."""
    return Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")


def inline(figure: Figure, key: str, alt: str) -> str:
    """The figure as an <svg> element; `key` keeps its ids apart from those of the page's other pictures."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'(url\(#|href="#)', rf"\1{key}-", text)
    text = re.sub("#[0-9a-f]{6}", lambda one: f"var(--{VARIABLES[one[0]]})" if one[0] in VARIABLES else one[0], text)
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]+"', head)
    drawn = f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" {box[0] if box else ""} role="img" aria-label="{escaped(alt)}">'
    return f"{drawn}{rest.strip()}"
