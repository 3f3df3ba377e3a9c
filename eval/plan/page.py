"""What `draftsmith plan` prints: a sentence, then the tables behind it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 140  # a pipe has no width of its own
PRECISIONS = ("fp32", "bf16")
TEACHERS = {"live": "live target", "sharded": "sharded", "stored": "stored"}


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """Print a plan."""
    console = console or Console(highlight=False)
    page = console if console.is_terminal else Console(file=console.file, width=WIDE, highlight=False)
    page.print(found["verdict"], soft_wrap=True, style="bold")
    for one in found["notes"]:
        page.print(f"Note: {one}.", soft_wrap=True)
    for build in (_models, _room, _largest, _times, _speed, _acceptance, _needed, _training):
        table = build(found)
        if table is not None:
            # Not rich's own title, which is folded to the width of its table.
            page.print(f"\n{table.caption}", soft_wrap=True)
            table.caption = None
            page.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(caption=title)
    for place, one in enumerate(columns):
        table.add_column(one, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _models(found: dict[str, Any]) -> Table:
    table = _table("What they are made of", "", "target", "draft")
    pair = (found["target"], found["draft"])
    rows: dict[str, Any] = {
        "name": lambda one: one["name"],
        "parameters": lambda one: f"{one['parameters']:,}",
        "of them embedding": lambda one: f"{one['embedding']:,}",
        "of them head": lambda one: f"{one['head']:,}" if one["head"] else "the embedding",
        "of them layers": lambda one: f"{one['layers']:,} in {one['blocks']}",
        "of them experts": lambda one: f"{one['experts']:,}",
        "weights": lambda one: _bytes(one["bytes"]),
        "read by a call": lambda one: _bytes(one["read_per_call"]),
        "cache of a token": lambda one: _bytes(one["cache_per_token"]),
    }
    for what, said in rows.items():
        if what != "of them experts" or any(one.get("experts") for one in pair):
            table.add_row(what, *("-" if "parameters" not in one and what != "name" else said(one) for one in pair))
    table.add_row("in memory beside the target", "", f"{found['draft']['own_parameters']:,}")
    return table


def _room(found: dict[str, Any]) -> Table:
    room, asked = found["serving"], found["asked"]
    table = _table(f"In memory at batch {asked['batch']}, context {asked['context']}, k = {room['k']}", "", "GB")
    for what in ("system", "target", "draft", "target_cache", "draft_cache", "work", "total", "has"):
        name = {"has": f"{asked['device']} has", "work": "in work"}.get(what, what.replace("_", "'s "))
        table.add_row(name, f"{room[what] / 1e9:.2f}", end_section=what == "work")
    return table


def _largest(found: dict[str, Any]) -> Table:
    contexts = list(found["most_batch"])
    table = _table("The largest batch that fits", "context", *map(str, contexts))
    table.add_row("batch", *(str(found["most_batch"][one]) for one in contexts))
    return table


def _times(found: dict[str, Any]) -> Table:
    times, asked = found["times"], found["asked"]
    table = _table(
        f"A round at batch {asked['batch']}, context {asked['context']} ({asked['engine']})", "", "ms", "of a plain call"
    )
    for what, ms, ratio in (
        ("a plain call of the target", times["plain"], 1.0),
        (f"a call on {times['k'] + 1} tokens", times["verify"], times["r"]),
        ("a drafted token", times["step"], times["c"]),
        ("what a round adds", times["round"], times["o"]),
    ):
        table.add_row(what, f"{ms * 1e3:.2f}", f"{ratio:.3f}")
    return table


def _speed(found: dict[str, Any]) -> Table:
    contexts = list(found["speed_up"])
    table = _table(f"Speed-up at acceptance {_alpha(found['alpha'])} (best k); full: does not fit", "batch", *map(str, contexts))
    for batch in found["speed_up"][contexts[0]] if contexts else ():
        cells = []
        for context in contexts:
            one = found["speed_up"][context][batch]
            off = " off" if one["speed_up"] <= 1 else ""
            cells.append(f"{one['speed_up']:.2f} (k{one['k']}){off}" + ("" if one["fits"] else " full"))
        table.add_row(str(batch), *cells)
    return table


def _acceptance(found: dict[str, Any]) -> Table:
    asked, contexts = found["asked"], list(found["speed_up"])
    table = _table(
        "By acceptance", "acceptance", f"at batch {asked['batch']}, context {asked['context']}",
        *(f"pays at {one}, batch" for one in contexts),
    )  # fmt: skip
    for one in found["by_alpha"]:
        ranges = (_ranges(one["pays"][context], found["largest_batch"]) for context in contexts)
        table.add_row(_alpha(one["alpha"]), f"{one['speed_up']:.2f} (k{one['k']})", *ranges)
    return table


def _needed(found: dict[str, Any]) -> Table:
    goals = list(next(iter(found["needed"].values())))
    table = _table(
        f"The acceptance that it takes, at context {found['asked']['context']}", "batch", *(f"for {one:g}x" for one in goals)
    )
    for batch, some in found["needed"].items():
        table.add_row(str(batch), *("never" if some[one] is None else f"{some[one]:.2f}" for one in goals))
    return table


def _training(found: dict[str, Any]) -> Table | None:
    if not found["training"]:
        return None
    asked, has = found["asked"], found["serving"]["has"] - found["serving"]["system"]
    table = _table(
        f"Training it: GB a process, micro-batches of {asked['tokens']} tokens, {asked['processes']} processes where there are several (! does not fit)",
        "scheme", *(f"{precision}, {says}" for precision in PRECISIONS for says in TEACHERS.values()),
    )  # fmt: skip
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for one in found["training"]:
        cell = f"{one['total'] / 1e9:.1f}" + ("" if one["total"] <= has else " !")
        cells.setdefault(one["scheme"], {})[one["precision"], one["teacher"]] = cell
    for scheme, row in cells.items():
        table.add_row(scheme, *(row.get((precision, teacher), "-") for precision in PRECISIONS for teacher in TEACHERS))
    return table


def _ranges(ranges: list[tuple[int, int]], largest: int) -> str:
    return ", ".join(f"{low}.." + ("" if high >= largest else f"{high}") for low, high in ranges) or "never"


def _alpha(alpha: tuple[float, ...]) -> str:
    return " ".join(f"{one:g}" for one in alpha)


def _bytes(count: float) -> str:
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.2f} {name}"
    return f"{count:.0f} B"
