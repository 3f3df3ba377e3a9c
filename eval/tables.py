"""A table of a report on the screen: as wide as a terminal is, and never folded where there is none."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_table(title: str, lines: list[list[str]]) -> None:
    head, *body = lines
    table = Table(title=title, title_justify="left")
    for place, one in enumerate(head):
        table.add_column(one, justify="left" if place == 0 else "right", no_wrap=place != 3)
    for line in body:
        table.add_row(*line)
    console = Console()
    # A pipe or a log has no width of its own; the table must not be folded to 80 columns there.
    (console if console.is_terminal else Console(width=150)).print(table)
