"""What `draftsmith compat` prints: facts side by side, the first differences, and a line for each engine."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.specdec.compat import SHOWN, Compat, Side, compat
from draftsmith.specdec.compat_engines import ENGINES
from draftsmith.specdec.tokens import ROLES

COLOURS = {"yes": "green", "no": "red", "with": "yellow"}
WIDE = 150  # a pipe has no width of its own


def show_compat(target: str, draft: str, console: Console | None = None) -> int:
    """Print how the two relate; 0 where Draftsmith can pair them, 1 where it cannot."""
    pair = compat(target, draft)
    console = console or Console(highlight=False)
    page = console if console.is_terminal else Console(file=console.file, width=WIDE, highlight=False)
    for one in (_facts(pair), _relation(pair), _differences(pair), _verdicts(pair)):
        if one is not None:
            page.print(one)
    return int(pair.problem is not None)


def _facts(pair: Compat) -> Table:
    table = Table("", "target", "draft", title_justify="left", title="Two vocabularies")
    sides = (pair.target, pair.draft)
    table.add_row("name", *(Text(one.name) for one in sides))
    table.add_row("tokens", *(str(len(one.tokens)) for one in sides))
    table.add_row("rows of the head", *(_rows(one) for one in sides))
    table.add_row("written as", *(one.kind for one in sides))
    for role in ROLES:
        if any(role in one.specials for one in sides):
            table.add_row(role, *(_special(one, role) for one in sides))
    table.add_row("adds to a text", *(_adds(one) for one in sides))
    table.add_row("positions", *(str(one.positions or "no limit") for one in sides))
    return table


def _relation(pair: Compat) -> str:
    total = len(pair.target.tokens)
    lines = [
        f"{pair.identical} of the target's {total} tokens are the draft's at the same id, {pair.moved} at another id, {pair.missing} it has not; "
        f"{pair.added} of its own the target has not.",
        "Chat templates: " + _templates(pair.target.template, pair.draft.template),
    ]
    ours, theirs = pair.target.positions, pair.draft.positions
    if theirs is not None and (ours is None or theirs < ours):
        lines.append(f"The draft serves {theirs} positions: where a text grows longer, the target goes on alone.")
    return "\n".join(lines)


def _differences(pair: Compat) -> Table | None:
    if not pair.differences:
        return None
    title = f"{len(pair.differences)} ids differ" + (f", the first {SHOWN}" if len(pair.differences) > SHOWN else "")
    table = Table("id", "target", "draft", title=title, title_justify="left")
    for one in pair.differences[:SHOWN]:
        table.add_row(str(one.id), *(Text("nothing" if token is None else repr(token)) for token in (one.target, one.draft)))
    return table


def _verdicts(pair: Compat) -> Table:
    table = Table("engine", "takes it", "why", title="Who takes the pair", title_justify="left")
    for name, judge in ENGINES.items():
        verdict = judge(pair)
        table.add_row(name, Text(verdict.takes, COLOURS[verdict.takes]), Text(verdict.why))
    return table


def _rows(side: Side) -> str:
    return f"{side.rows}" + (f", {side.padding} of them padding" if side.padding else "")


def _special(side: Side, role: str) -> Text:
    one = side.specials.get(role)
    return Text("none" if one is None else f"{one.id} {one.token}")


def _adds(side: Side) -> str:
    return " and ".join(name for name, adds in (("BOS", side.adds_bos), ("EOS", side.adds_eos)) if adds) or "nothing"


def _templates(ours: str | None, theirs: str | None) -> str:
    if ours == theirs:
        return "equal." if ours else "neither has one."
    if ours is None or theirs is None:
        return f"only the {'draft' if ours is None else 'target'} has one; Draftsmith asks the target's alone."
    return "they differ; Draftsmith asks the target's alone."
