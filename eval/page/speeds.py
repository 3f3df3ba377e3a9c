"""Pictures of what it is worth: speed-up by kind of text, and against the length of the draft beside the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from draftsmith.eval.page.picture import Picture, line, listed
from draftsmith.eval.page.series import Series, short
from draftsmith.eval.page.svg import INK, LINE, MUTED, PAPER, SERIES, sheet
from draftsmith.eval.reports import TIMES, found, interval, number

TICKS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
ROW, GAP = 12, 13  # points of a candidate, and between two kinds


def by_kind(part: dict[str, Any], shown: Sequence[Series]) -> Picture | None:
    """A point and its interval for each drafter on each kind of text, beside plain decoding's 1 and its noise."""
    best = [part["candidates"][one.best] for one in shown]
    rows = [(kind, [found(one, "kinds", kind, "speed_up") for one in best]) for kind in part["kinds"]]
    figure = forest([*rows, ("all", [found(one, "all", "speed_up") for one in best])], shown, part)
    if figure is None:
        return None
    overall = [f"{one.best} {interval(it, 'all', 'speed_up')}" for one, it in zip(shown, best, strict=True)]
    return Picture(
        "kinds", "Speed-up by kind of text", figure, f"Speed-up by kind of text with intervals. Over all: {listed(overall)}.",
        "Tokens a second over plain decoding's on the same prompts, with the 95 % interval over prompts. An interval that touches the line "
        "at 1 shows no gain" + ("; the grey band is plain decoding against itself." if number(part, "noise", "low") else "."),
        [(one, one.best) for one in shown],
    )  # fmt: skip


def forest(rows: Sequence[tuple[str, Sequence[Any]]], shown: Sequence[Series], part: Mapping[str, Any]) -> Figure | None:
    """Rows of (name, the speed-up of each of `shown`), the last one set apart; None where no speed-up is known."""
    points, ends, group = [], [], GAP + ROW * len(shown)
    for row, (_, speeds) in enumerate(rows):
        for place, (one, speed) in enumerate(zip(shown, speeds, strict=True)):
            value, low, high = (number(speed, end) for end in ("value", "low", "high"))
            if value is not None and value > 0:
                points.append((one, row * group + place * ROW, value, low, high))
                ends += [each for each in (value, low, high) if each]
    if not points:
        return None
    figure = sheet(46 + group * len(rows))
    axes = figure.subplots()
    for one, y, value, low, high in points:
        if low is not None and high is not None:
            axes.plot([low, high], [y, y], color=SERIES[one.colour], linewidth=1.6, solid_capstyle="butt")
        axes.plot([value], [y], **line(one, markersize=6))
    centre = (len(shown) - 1) * ROW / 2
    axes.set_yticks([row * group + centre for row in range(len(rows))], [short(name) for name, _ in rows])
    axes.tick_params(axis="y", labelcolor=INK)
    for row in range(1, len(rows)):
        axes.axhline(row * group - (GAP + ROW) / 2, color=LINE, linewidth=1.4 if row == len(rows) - 1 else 0.6)
    axes.set_ylim(group * len(rows) - (GAP + ROW) / 2, -(GAP + ROW) / 2)
    axes.spines["left"].set_visible(False)
    _ratios(axes.xaxis, axes, min(ends), max(ends))
    _plain(axes, part, upright=True)
    axes.set_xlabel("times plain decoding")
    return figure


class Point(NamedTuple):
    """A setting in the picture: where it stands, what was measured, and what was predicted."""

    x: float
    name: str
    k: int | str
    value: float
    low: float | None
    high: float | None
    ahead: float | None


def against_k(part: dict[str, Any], shown: Sequence[Series]) -> Picture | None:
    """Measured and predicted speed-up of every setting of every drafter; adaptive ones stand at the right."""
    every = part["candidates"]
    ks = sorted({one["k"] for one in every.values() if isinstance(one.get("k"), int)})
    if not ks:
        return None
    at: dict[int | str, float] = {k: float(k) for k in ks}
    if any(one.get("k") == "adaptive" for one in every.values()):
        at["adaptive"] = ks[-1] + max(1.0, 0.12 * (ks[-1] - ks[0]))
    wide = max(at.values()) - ks[0] + 1
    points = {one: _points(one, every, at, (one.place - (len(shown) - 1) / 2) * 0.02 * wide) for one in shown}
    flat = [each for some in points.values() for each in some]
    if not flat:
        return None
    figure = sheet(250)
    axes = figure.subplots()
    for one, some in points.items():
        _draw(axes, one, some)
    axes.set_xticks(list(at.values()), [str(k) for k in at])
    axes.set_xlim(ks[0] - 0.12 * wide, max(at.values()) + 0.12 * wide)
    ends = [end for each in flat for end in (each.value, each.low, each.high, each.ahead) if end]
    _ratios(axes.yaxis, axes, min(ends), max(ends))
    axes.spines["left"].set_visible(False)
    _plain(axes, part, upright=False)
    axes.set_xlabel("k, tokens drafted for a call of the target")
    said = [f"{each.name} {each.value:.2f}" + (f" (predicted {each.ahead:.2f})" if each.ahead else "") for each in flat]
    foretold = " Hollow and dashed: predicted by S = tau / (k c + r + o)." if any(each.ahead for each in flat) else ""
    adaptive = " Adaptive settings draft what pays, none included." if "adaptive" in at else ""
    return Picture(
        "k", "Speed-up against the length of the draft", figure, f"Measured speed-up by k. {listed(said)}.",
        f"Filled: measured, with its 95 % interval.{foretold}{adaptive}", [(one, one.label) for one, some in points.items() if some],
    )  # fmt: skip


def _points(one: Series, candidates: Mapping[str, Any], at: Mapping[int | str, float], shift: float) -> list[Point]:
    """Its settings by k; `shift` keeps the intervals of several drafters apart."""
    some = []
    for name in one.settings:
        candidate = candidates[name]
        value, k = number(candidate, "all", "speed_up", "value"), candidate.get("k")
        if value and k in at:
            low, high = (number(candidate, "all", "speed_up", end) for end in ("low", "high"))
            some.append(Point(at[k] + shift, name, k, value, low, high, number(candidate, "predicted", "speed_up")))
    return sorted(some, key=lambda each: each.x)


def _draw(axes: Axes, one: Series, some: Sequence[Point]) -> None:
    colour = SERIES[one.colour]
    fixed = [each for each in some if each.k != "adaptive"]
    axes.plot([each.x for each in fixed], [each.value for each in fixed], color=colour, linewidth=1.5)
    ahead = [(each.x, each.ahead) for each in fixed if each.ahead]
    axes.plot([x for x, _ in ahead], [value for _, value in ahead], color=colour, linestyle=(0, (2, 2)), linewidth=1.5)
    for each in some:
        if each.low is not None and each.high is not None:
            axes.plot([each.x] * 2, [each.low, each.high], color=colour, linewidth=1.5)
        if each.ahead:
            hollow = {"markerfacecolor": PAPER, "markeredgecolor": colour, "markeredgewidth": 1.4}
            axes.plot([each.x], [each.ahead], **line(one, **hollow), linestyle="none")
        axes.plot([each.x], [each.value], **line(one))


def _ratios(axis: Axis, axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis of ratios: half as fast is as far from 1 as twice as fast."""
    low, high = min(low, 0.95) / 1.04, max(high, 1.05) * 1.04
    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    (axes.set_xlim if axis is axes.xaxis else axes.set_ylim)(low, high)
    ticks = [one for one in TICKS if low <= one <= high]
    if len(ticks) < 3:
        ticks = [one for one in np.round(np.arange(0.1, 3, 0.1), 1) if low <= one <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{TIMES}"))
    axes.grid(axis="x" if axis is axes.xaxis else "y")


def _plain(axes: Axes, part: Mapping[str, Any], upright: bool) -> None:
    draw, band = (axes.axvline, axes.axvspan) if upright else (axes.axhline, axes.axhspan)
    draw(1, color=MUTED, linewidth=1.3)
    low, high = number(part, "noise", "low"), number(part, "noise", "high")
    if low is not None and high is not None:
        band(low, high, color=MUTED, alpha=0.18, linewidth=0)
