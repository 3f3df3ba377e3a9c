"""The tables of the page: a column is a heading and what it says of a candidate, and one of which nothing is known is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.eval import report
from draftsmith.eval.page.series import with_k
from draftsmith.eval.page.words import escaped, together
from draftsmith.eval.reports import NOTHING, TIMES, fastest, found, interval, number

Cell = Callable[[Mapping[str, Any]], str | None]


class Table(NamedTuple):
    """Rows of text behind a heading; the first cell of each names it, `best` is the row that stands out."""

    title: str
    head: list[str]
    rows: list[list[str]]
    best: int | None = None


def of(*path: str, digits: int = 2, unit: str = "") -> Cell:
    """The number at a path."""

    def cell(candidate: Mapping[str, Any]) -> str | None:
        value = number(candidate, *path)
        return None if value is None else f"{value:.{digits}f}{unit}"

    return cell


def ratio(*path: str) -> Cell:
    return lambda candidate: interval(candidate, *path)


def pair(what: str) -> Cell:
    """Milliseconds, and plain decoding's behind the stroke."""

    def cell(candidate: Mapping[str, Any]) -> str | None:
        ours, theirs = number(candidate, "all", what), number(candidate, "all", f"baseline_{what}")
        return None if ours is None or theirs is None else f"{ours:.0f} / {theirs:.0f}"

    return cell


def positions(candidate: Mapping[str, Any]) -> str | None:
    counts = found(candidate, "all", "acceptance_by_position")
    return report.by_position(counts) if counts else None


def equal(candidate: Mapping[str, Any]) -> str | None:
    return report.equal(candidate["all"]) if found(candidate, "all", "compared") is not None else None


def alpha(candidate: Mapping[str, Any]) -> str | None:
    return interval({**(found(candidate, "teacher_forced") or {}), "value": number(candidate, "teacher_forced", "alpha")})


def peak(candidate: Mapping[str, Any]) -> str | None:
    value = number(candidate, "all", "peak_bytes")
    return f"{value / 1e6:,.0f}" if value else None


WORTH: dict[str, Cell] = {
    "speed-up": ratio("all", "speed_up"), "tokens/call": of("all", "tokens_per_call"), "acc./drafted": of("all", "accepted_per_drafted"), "acc. length": of("all", "mean_acceptance_length"),
    "acc. by position": positions, "draft ms": of("all", "draft_ms", digits=1), "target ms": of("all", "target_ms", digits=0),
    "plain ms": of("all", "baseline_ms", digits=0), "equal": equal,
}  # fmt: skip
COSTS: dict[str, Cell] = {
    "tau": ratio("all", "tau"), "block length": of("teacher_forced", "block_length"), "alpha": alpha, "c": of("predicted", "c", digits=3),
    "r": of("predicted", "r"), "o": of("predicted", "o", digits=3), "forecast": of("predicted", "forecast"), "predicted": of("predicted", "speed_up"),
    "teacher-forced": of("teacher_forced", "speed_up"), "measured": ratio("all", "speed_up"), "break-even": of("predicted", "break_even_alpha"),
    "MBSU": of("all", "mbsu"),
}  # fmt: skip
WAITS: dict[str, Cell] = {
    "first token, ms": pair("first_token_ms"), "per token, ms": pair("per_token_ms"), "answer, ms": pair("answer_ms"), "peak, MB": peak,
}  # fmt: skip


def tables(part: Mapping[str, Any]) -> list[Table]:
    """What a part's candidates are worth, by kind of text, what a round costs, and what a client waits for."""
    made = [
        _table("What the drafts are worth", part, WORTH),
        _kinds(part),
        _table("What a round costs, and the speed-up that follows", part, COSTS, needs=("predicted", "alpha", "tau")),
        _table("What a client waits for (plain decoding behind the stroke)", part, WAITS),
    ]
    return [one for one in made if one is not None]


def _table(title: str, part: Mapping[str, Any], columns: Mapping[str, Cell], needs: Sequence[str] = ()) -> Table | None:
    candidates = part["candidates"]
    cells = {head: [cell(one) for one in candidates.values()] for head, cell in columns.items()}
    known = {head: column for head, column in cells.items() if any(one is not None for one in column)}
    if not known or (needs and not any(one in known for one in needs)):
        return None
    rows = [
        [with_k(name, one), *(column[place] or NOTHING for column in known.values())]
        for place, (name, one) in enumerate(candidates.items())
    ]
    best = fastest(part)
    return Table(title, ["drafter", *known], rows, None if best is None else list(candidates).index(best))


def _kinds(part: Mapping[str, Any]) -> Table | None:
    """Tokens a call and speed-up, a row a kind."""
    candidates, rows = part["candidates"], []
    for kind in [*part["kinds"], None]:
        row = [kind if kind is not None else "all"]
        for one in candidates.values():
            figures = one["all"] if kind is None else found(one, "kinds", kind)
            tokens, speed = number(figures, "tokens_per_call"), number(figures, "speed_up", "value")
            said = [f"{speed:.2f}{TIMES}"] if speed is not None else []
            row.append(" · ".join(said + ([f"{tokens:.2f}"] if tokens is not None else [])) or NOTHING)
        rows.append(row)
    return Table("Speed-up · tokens a call, by kind of text", ["kind", *candidates], rows)


def as_html(table: Table) -> str:
    """A table that scrolls by itself where the screen is narrow, with its first column in sight."""
    title = escaped(table.title)
    head = "".join(f'<th scope="col">{escaped(one)}</th>' for one in table.head)
    lines = []
    for place, (first, *rest) in enumerate(table.rows):
        cells = "".join(f"<td{' class=wide' if len(one) > 30 else ''}>{escaped(one)}</td>" for one in rest)
        lines.append(
            f'<tr{" class=best" if place == table.best else ""}><th scope="row"><span>{escaped(together(first))}</span></th>{cells}</tr>'
        )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table><caption><span>{title}</span></caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )
