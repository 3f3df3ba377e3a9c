"""`draftsmith compare`: the tables on the screen, and the same as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from draftsmith.eval.compare.compared import Compared, compare
from draftsmith.eval.page.document import STANDINGS, document, legend, standing
from draftsmith.eval.page.series import MARKERS, Series
from draftsmith.eval.page.speeds import forest
from draftsmith.eval.page.svg import drawing, inline
from draftsmith.eval.page.tables import Table, as_html
from draftsmith.eval.page.words import escaped
from draftsmith.eval.reports import NOTHING, fastest, found, interval, where
from draftsmith.eval.tables import print_table
from draftsmith.recipes.files import write_whole


def show_comparison(places: Sequence[str], out: Path | None) -> None:
    """Print the comparison of run folders or report.json files; into `out` too, as a page, where it is given."""
    compared = compare(places)
    for table in [*compared.side_by_side, *([compared.ratios] if compared.ratios else [])]:
        print_table(escape(table.title), [list(map(escape, row)) for row in (table.head, *table.rows)])
    for sentence in [*compared.found, *compared.not_compared]:
        print(sentence)
    if out is not None:
        write_whole(out, page(compared))
        print(f"page: {out}")


def page(compared: Compared) -> str:
    """What was found, what could not be compared, a picture of the fastest, the tables."""
    names = [name for name, _ in compared.reports]
    body = ['<header><p class="eyebrow">Reports side by side</p>', f"<h1>{escaped(' · '.join(names))}</h1>"]
    verdict, *more = compared.found or ["Nothing here can be compared prompt by prompt."]
    body.append(f'<p class="verdict">{escaped(verdict)}</p>')
    body += [f'<ul class="said">{"".join(f"<li>{escaped(one)}</li>" for one in more)}</ul>'] if more else []
    if compared.not_compared:
        left = "".join(f"<li>{escaped(one)}</li>" for one in compared.not_compared)
        body.append(f'<section class="care"><h2>Read with care</h2><ul>{left}</ul></section>')
    body += ["</header>", "<main>", "<h2>Each report's fastest, by kind of text</h2>", _pictures(compared), "<h2>Tables</h2>"]
    body += map(as_html, [*([compared.ratios] if compared.ratios else []), *compared.side_by_side, _how(compared)])
    return document(" · ".join(names), [*body, "</main>"], "draftsmith compare")


def _pictures(compared: Compared) -> str:
    """The fastest of each report by kind of text, a picture a setting of the first report."""
    out = []
    for place, part in enumerate(compared.reports[0][1]["parts"]):
        same = [(name, one) for name, report in compared.reports for one in report["parts"] if where(one) == where(part)]
        best = [(name, chosen, one["candidates"][chosen]) for name, one in same if (chosen := fastest(one)) is not None]
        shown = [Series(name, name, (name,), number % len(MARKERS)) for number, (name, *_) in enumerate(best)]
        kinds = dict.fromkeys(kind for _, one in same for kind in one["kinds"])
        rows = [(kind, [found(one, "kinds", kind, "speed_up") for *_, one in best]) for kind in kinds]
        with drawing():
            figure = forest([*rows, ("all", [found(one, "all", "speed_up") for *_, one in best])], shown, {})
            if figure is None:
                continue
            overall = "; ".join(f"{name} {interval(one, 'all', 'speed_up')}" for name, _, one in best)
            drawn = inline(
                figure, f"c{place}", f"Speed-up of each report's fastest candidate by kind of text. Over all: {overall}."
            )
        names = [(one, f"{name}: {chosen}") for one, (name, chosen, _) in zip(shown, best, strict=True)]
        out.append(
            f"<figure><h3>{escaped(where(part))}</h3>{legend(names)}{drawn}<figcaption>Tokens a second over the plain decoding of the same report, on all "
            "that it measured, with the 95 % interval over prompts.</figcaption></figure>"
        )
    return f'<div class="plots">{"".join(out)}</div>'


def _how(compared: Compared) -> Table:
    """What each report stands on, in a column."""
    keys = dict.fromkeys(key for _, report in compared.reports for key in report["how"])
    rows = [[key.replace("_", " "), *(_plain(report["how"].get(key)) for _, report in compared.reports)] for key in keys]
    verdicts = ["standing of the fastest", *(_standing(report) for _, report in compared.reports)]
    return Table("How each was measured", ["", *(name for name, _ in compared.reports)], [verdicts, *rows])


def _standing(report: object) -> str:
    part = found(report, "parts")[0]
    name = fastest(part)
    return NOTHING if name is None else STANDINGS[standing(part["candidates"][name]["all"].get("speed_up"))]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return str(value.get("said") or ", ".join(f"{name} {one}" for name, one in value.items()))
    return NOTHING if value in (None, "") else str(value)
