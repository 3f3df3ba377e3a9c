"""The c-alpha map: what acceptance and the price of a draft are worth together, by the formula, and where the candidates stand on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from draftsmith.eval.page.picture import Picture, line, listed
from draftsmith.eval.page.series import Series
from draftsmith.eval.page.svg import INK, PAPER, SERIES, sheet
from draftsmith.eval.reports import TIMES, found, number

LONGEST = 16  # drafts a call, of which the best number is taken at every point
LEVELS = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
TICKS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def best_speed_up(alpha: Any, c: Any, slope: float = 0.0, loop: float = 0.0) -> Any:
    """max over k > 0 of tau / (k c + r(k+1) + o), tau = sum of alpha^i for i = 0..k, r(k+1) = 1 + slope k; slope = loop = 0 is
    Leviathan et al., 2211.17192, section 3.3. Below 1 it is better not to draft. Arrays broadcast."""
    tau, best = np.ones_like(np.asarray(alpha, dtype=float) + c), np.asarray(0.0)
    for k in range(1, LONGEST + 1):
        tau = tau + np.asarray(alpha, dtype=float) ** k
        best = np.maximum(best, tau / (k * c + 1 + slope * k + loop))
    return best


def stands(candidate: Mapping[str, Any]) -> tuple[float, float] | None:
    """(c, alpha) of a candidate: a drafted token in plain steps, and the share of the drafts that were reached and accepted."""
    counts = found(candidate, "all", "acceptance_by_position") or []
    tried = sum(each for _, each in counts)
    c = number(candidate, "predicted", "c")
    if c is None:
        draft, plain = number(candidate, "all", "draft_ms"), number(candidate, "all", "baseline_ms")
        c = draft / plain if draft is not None and plain else None
    return (c, sum(one for one, _ in counts) / tried) if c is not None and c > 0 and tried else None


def slope_of(part: Mapping[str, Any]) -> tuple[float, float]:
    """What each drafted token adds to a verifying call, in plain steps, and what the loop adds to a round: medians over fixed k."""
    slopes, loops = [], []
    for one in part["candidates"].values():
        if isinstance(one.get("k"), int) and found(one, "all", "drafted"):
            r = number(one, "predicted", "r")
            fed = number(one, "predicted", "drafted") or float(one["k"])
            call, plain = number(one, "all", "target_ms"), number(one, "all", "baseline_ms")
            if r is None and call is not None and plain:
                r, fed = call / plain, one["all"]["drafted"] / max(one["all"].get("target_calls") or 1, 1)
            if r is not None and fed:
                slopes.append(max(0.0, (r - 1) / fed))
            loops.append(number(one, "predicted", "o") or 0.0)
    return (median(slopes) if slopes else 0.0), (max(0.0, median(loops)) if loops else 0.0)


def c_alpha(part: dict[str, Any], shown: Sequence[Series]) -> Picture | None:
    """Contours of the best speed-up over c and alpha, and each drafter's fastest setting on them."""
    places = [(one, at) for one in shown if (at := stands(part["candidates"][one.best]))]
    if not places:
        return None
    slope, loop = slope_of(part)
    left = max(1e-4, min(0.01, *(c / 4 for _, (c, _) in places)))
    right = max(1.0, *(c * 1.6 for _, (c, _) in places))
    c, alpha = np.geomspace(left, right, 120), np.linspace(0.0, 0.995, 100)
    grid = best_speed_up(alpha[:, None], c[None, :], slope, loop)
    figure = sheet(290)
    axes = figure.subplots()
    axes.set_xscale("log")  # before the contours: their labels are laid out on the axis as it is
    levels = [one for one in LEVELS if one < grid.max()] or [1.0]
    tints = [to_rgba(SERIES[0], min(0.06 + 0.085 * place, 0.55)) for place in range(len(levels))]
    axes.contourf(c, alpha, grid, levels=[*levels, 1e9], colors=tints)
    lines = axes.contour(c, alpha, grid, levels=levels, colors=[SERIES[0]], linewidths=0.8)
    edge = 8  # columns from the left, where no candidate stands
    spots = [(c[edge], float(np.interp(one, grid[:, edge], alpha))) for one in levels if one < grid[-1, edge]]
    axes.clabel(lines, fmt=lambda value: f"{value:.3g}{TIMES}", fontsize=10, colors=[INK], manual=spots)
    for one, (x, y) in places:
        axes.plot([max(x, left)], [y], **line(one, markersize=9, markeredgecolor=PAPER, markeredgewidth=1.2), linestyle="none")
        speed = number(part["candidates"][one.best], "all", "speed_up", "value")
        if speed is not None:
            axes.annotate(
                f"{speed:.2f}{TIMES}",
                (max(x, left), y),
                (7, 5),
                textcoords="offset points",
                fontsize=11.5,
                color=INK,
                fontweight="bold",
            )
    axes.xaxis.set_major_locator(FixedLocator([one for one in TICKS if left <= one <= right]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1)
    axes.set_xlabel("c, price of a drafted token in plain steps")
    axes.set_ylabel("acceptance of a draft")
    said = [f"{one.best} at c {x:.3g}, acceptance {y:.0%}" for one, (x, y) in places]
    round_trip = f"checking k drafts costs 1 + {slope:.2f} k" + (f" + {loop:.2f}" if loop >= 0.005 else "")
    return Picture(
        "map", "Price and acceptance, and what they are worth together", figure, f"Map of price and acceptance. {listed(said)}.",
        f"Contours: the best speed-up over k by S = tau / (k c + r + o), if every draft is as likely to be accepted as any other and {round_trip} "
        "plain steps (as measured here). Points: the candidates, with their measured speed-up, which counts the reading of the prompt and the calls without a draft too. Below the lowest contour nothing pays.",
        [(one, one.best) for one, _ in places],
    )  # fmt: skip
