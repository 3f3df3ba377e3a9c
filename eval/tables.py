"""A table of a report on the screen: as wide as a terminal is, and never folded where there is none."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

NARROWEST = 150  # columns of a pipe or a log, which has no width of its own
LONG = 36  # letters of a list of figures; a longer one goes on in another line


def print_table(title: str, lines: list[list[str]]) -> None:
    head, *body = lines
    table = Table(title=title, title_justify="left")
    for place, one in enumerate(head):
        lists = place > 0 and any(len(line[place]) > LONG and " " in line[place] for line in body)
        table.add_column(one, justify="left" if place == 0 else "right", no_wrap=not lists, max_width=LONG if lists else None)
    for line in body:
        table.add_row(*line)
    console = Console()
    if not console.is_terminal:  # all of it: what does not fit would be cut off, and whole columns left out
        wide = Console(width=10_000)
        console = Console(width=max(NARROWEST, Measurement.get(wide, wide.options, table).maximum))
    console.print(table)
