"""Where a growing text is shown: a screen, which wraps and colours it above a live line, or a pipe, which gets nothing but text."""

from __future__ import annotations

import sys
from typing import IO, Protocol

from rich.cells import cell_len, chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

DRAFT, TARGET = "bold green", ""  # bold too, so that it shows without colours
# A model may write any byte. What a terminal would obey is shown by its picture, a return alone or before a newline not at all.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t\r"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
SHOWN: dict[int, int | str] = {**PICTURES, ord("\t"): "    ", ord("\r"): ""}


class Page(Protocol):
    """Gets text piece by piece and a count now and then; `say` is for what comes behind the text."""

    def note(self, markup: str) -> None: ...

    def write(self, piece: str, drafted: bool) -> None: ...

    def tally(self, line: str) -> None: ...

    def close(self) -> None: ...

    def say(self, line: str) -> None: ...


class Pipe:
    """The text and nothing else; what is said about it goes to stderr."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._end = file, "\n"

    def note(self, markup: str) -> None:
        """Nobody looks at colours here."""

    def write(self, piece: str, drafted: bool) -> None:
        if piece:
            self._file.write(piece)
            self._file.flush()
            self._end = piece[-1]

    def tally(self, line: str) -> None:
        """A pipe has no line that could be written over."""

    def close(self) -> None:
        if self._end != "\n":
            self._file.write("\n")
        self._file.flush()

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Screen:
    """Finished lines scroll away as ordinary text; only the line being written and the count below it are live."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def note(self, markup: str) -> None:
        if markup:
            self._console.print(markup, style="dim")
        self._live.start()

    def write(self, piece: str, drafted: bool) -> None:
        for place, part in enumerate(piece.translate(SHOWN).split("\n")):
            if place:
                self._finish(self._line)
                self._line = Text()
            self._line.append(part, DRAFT if drafted else TARGET)
            while cell_len(self._line.plain) > self._console.width:
                head, self._line = self._line.divide([_break(self._line.plain, self._console.width)])
                head.rstrip()
                self._finish(head)

    def tally(self, line: str) -> None:
        self._live.update(Group(self._line, Text(line, style="dim", no_wrap=True, overflow="ellipsis")), refresh=True)

    def close(self) -> None:
        self._live.stop()
        if self._line.plain:
            self._finish(self._line)

    def say(self, line: str) -> None:
        self._console.print(Text(line, style="dim"))

    def _finish(self, line: Text) -> None:
        self._console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _break(line: str, width: int) -> int:
    """How many characters stay on a line that is too wide: up to its last space, or all that fit."""
    fits = max(len(chop_cells(line, width)[0]), 1)
    space = line.rfind(" ", 0, fits + 1)
    return space + 1 if line[: max(space, 0)].strip() else fits
