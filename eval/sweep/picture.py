"""sweep.png: two maps on one scale of colour, so that a prediction that errs is seen beside what it erred about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from draftsmith.eval.candidates import layer_of
from draftsmith.recipes.files import whole_file

COLOURS = "PuOr_r"  # two hues that the colour-blind tell apart, pale at 1, where speculation gains nothing
LEAST = 1.05  # the scale's upper end at least, so that noise around 1 does not fill it
FINE, COARSE = (
    (0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5),
    (0.05, 0.1, 0.2, 0.33, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 10.0, 20.0),
)


def draw(sweep: dict[str, Any], path: Path) -> None:
    """The two panels into a .png or .svg; the best setting of each is ringed."""
    drafters, ks, figures = sweep["drafters"], sweep["k"], _figures(sweep)
    layers = layer_axis(drafters)
    order = list(range(len(drafters))) if layers is None else sorted(range(len(drafters)), key=lambda place: layers[place])
    grids = {title: np.array([[by[drafters[place], k] for k in ks] for place in order]) for title, by in figures.items()}
    most = max(LEAST, *(max(one.max(), 1 / one.min()) for one in grids.values()))
    norm = LogNorm(1 / most, most)
    figure = Figure(figsize=(4.4 + 1.1 * len(ks), 2.4 + 0.6 * max(len(drafters), 3)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, grid) in zip(panels, grids.items(), strict=True):
        _panel(axes, grid, norm, contours=layers is not None)
        axes.set_title(f"{title}; best {grid.max():.2f}")
        axes.set_xlabel("k, drafted tokens a round")
        axes.set_xticks(range(len(ks)), ks)
        axes.set_yticks(range(len(order)), [drafters[place] if layers is None else layers[place] for place in order])
    family = None if layers is None else layer_of(drafters[0])
    panels[0].set_ylabel("drafter" if family is None else "exit after layer" + ("" if family[0] == "exit" else f", {family[0]}"))
    shown = [one for one in (FINE if most < max(FINE) else COARSE) if 1 / most <= one <= most]
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=panels, label="speed-up over plain decoding")
    bar.set_ticks(shown, labels=[f"{one:g}" for one in shown])
    bar.minorticks_off()
    figure.suptitle(sweep["recommendation"]["text"].partition(" Chosen on")[0], fontsize=9, wrap=True)
    with whole_file(path) as beside:
        figure.savefig(beside, format=path.suffix[1:], dpi=150)


def layer_axis(drafters: Sequence[str]) -> list[int] | None:
    """Each drafter's layer, where all are exits of one family; None where they have no order."""
    exits = [one for one in map(layer_of, drafters) if one]
    return [layer for _, layer in exits] if len(exits) == len(drafters) and len({name for name, _ in exits}) == 1 else None


def _figures(sweep: dict[str, Any]) -> dict[str, dict[tuple[str, int], float]]:
    cells = {(one["drafter"], one["k"]): one for one in sweep["cells"]}
    return {
        "predicted": {setting: one["predicted"]["speed_up"] for setting, one in cells.items()},
        "measured": {setting: one["measured"]["speed_up"]["value"] for setting, one in cells.items()},
    }


def _panel(axes: Axes, grid: np.ndarray, norm: LogNorm, contours: bool) -> None:
    """`grid` [drafters, ks], drawn at equal distances, so that neighbouring layers of a deep target do not cover each other."""
    rows, columns = grid.shape
    if contours and min(grid.shape) > 1:  # between drafters without an order they would mean nothing
        axes.contourf(grid, levels=np.geomspace(norm.vmin or 0.5, norm.vmax or 2, 25), norm=norm, cmap=COLOURS)
        if grid.min() < 1 < grid.max():
            axes.contour(grid, levels=[1.0], colors="black", linewidths=1.2, linestyles="dashed")
    for (row, column), value in np.ndenumerate(grid):
        best = value == grid.max()
        axes.scatter(
            column, row, c=[value], norm=norm, cmap=COLOURS, s=700, edgecolors="black", linewidths=2.5 if best else 0.4
        )  # fmt: skip
        dark = abs(norm(value) - 0.5) > 0.33
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(-0.5, rows - 0.5)
