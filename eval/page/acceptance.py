"""Pictures of what the target accepts: by position in the draft, and how many drafts of a call at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator, PercentFormatter

from draftsmith.eval.page.picture import Picture, line, listed
from draftsmith.eval.page.series import Series, short
from draftsmith.eval.page.svg import INK, MUTED, PAPER, SERIES, sheet
from draftsmith.eval.reports import found

FEW = 20  # calls that got to a position; a share of fewer is drawn hollow


def by_position(part: dict[str, Any], shown: Sequence[Series]) -> Picture | None:
    """Conditional acceptance: of the calls in which all drafts before were accepted, the share in which this one was."""
    curves = []
    for one in shown:
        counts = found(part["candidates"][one.best], "all", "acceptance_by_position") or []
        points = [(place, accepted, tried) for place, (accepted, tried) in enumerate(counts, 1) if tried]
        if points:
            curves.append((one, points))
    if not curves:
        return None
    figure = sheet(230)
    axes = figure.subplots()
    for one, points in curves:
        places, shares = [place for place, *_ in points], [accepted / tried for _, accepted, tried in points]
        axes.plot(places, shares, color=SERIES[one.colour])
        for place, share, (_, _, tried) in zip(places, shares, points, strict=True):
            hollow = {"markerfacecolor": PAPER, "markeredgecolor": SERIES[one.colour], "markeredgewidth": 1.4}
            axes.plot([place], [share], **line(one, **(hollow if tried < FEW else {})), linestyle="none")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("position in the draft")
    said = [f"{one.best} {', '.join(f'{a / n:.0%}' for _, a, n in points)}" for one, points in curves]
    return Picture(
        "position", "Accepted, by position in the draft", figure, f"Share accepted at each drafted position. {listed(said)}.",
        "Of the calls in which every draft before was accepted, the share in which this one was. A line that rises says: where the "
        f"draft is right, it stays right. Hollow: fewer than {FEW} calls got there.",
        [(one, one.best) for one, _ in curves],
    )  # fmt: skip


def histogram(part: dict[str, Any], shown: Sequence[Series]) -> Picture | None:
    """How many drafts of a call were accepted, a row a drafter."""
    counted = [(one, list(found(part["candidates"][one.best], "all", "histogram") or [])) for one in shown]
    counted = [(one, counts) for one, counts in counted if sum(counts)]
    if not counted:
        return None
    most = max(len(counts) for _, counts in counted)
    figure = sheet(42 + 70 * len(counted))
    panels = figure.subplots(len(counted), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (one, counts) in zip(panels, counted, strict=True):
        shares = [count / sum(counts) for count in counts]
        axes.bar(range(len(shares)), shares, width=0.78, color=SERIES[one.colour])
        for place, share in enumerate(shares):
            if counts[place]:
                text = f"{share:.0%}" if share >= 0.01 else "<1%"
                axes.text(place, share + 0.04, text, ha="center", va="bottom", fontsize=10.5, color=MUTED)
        axes.set_ylim(0, 1.25)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_title(short(one.best), loc="left", color=INK, pad=1)
    panels[-1].set_xticks(range(most))
    panels[-1].set_xlabel("drafts accepted in a call of the target")
    said = [f"{one.best} {', '.join(f'{n}: {count}' for n, count in enumerate(counts))}" for one, counts in counted]
    return Picture(
        "histogram", "How many drafts a call accepts", figure, f"Calls by drafts accepted. {listed(said)}.",
        "Of the calls of the target that had a draft to check, the share that accepted none, one, two ... of it. Each call adds one "
        "token of the target's own.",
        [],  # each row has its name
    )  # fmt: skip
