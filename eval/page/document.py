"""The page from top to bottom: what to do, the plots, texts, tables, what the words mean, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.eval.advice import leading
from draftsmith.eval.page import acceptance, atlas, speeds
from draftsmith.eval.page.picture import Picture
from draftsmith.eval.page.series import GLYPHS, Series, series, with_k
from draftsmith.eval.page.svg import drawing, inline
from draftsmith.eval.page.tables import as_html, tables
from draftsmith.eval.page.words import escaped, together, written
from draftsmith.eval.reports import TIMES, checked, fastest, found, interval, number, where
from draftsmith.recipes.files import write_whole

PICTURES = (speeds.by_kind, speeds.against_k, acceptance.by_position, acceptance.histogram, atlas.c_alpha)
STANDINGS = {
    "good": "Worth it: the whole interval lies above 1",
    "bad": "Not worth it: the whole interval lies below 1",
    "wait": "No gain shown: the interval does not exclude 1",
    "unknown": "Too few prompts for an interval",
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # a browser would refuse whatever the page asked for


def write(report: Mapping[str, Any], path: Path) -> None:
    """The page of a report of schema 2; ValueError of another."""
    write_whole(path, html(report))


def html(report: Mapping[str, Any]) -> str:
    report = checked(report, "this report")
    parts = report["parts"]
    several = len(parts) > 1
    body = [_header(report), "<main>"]
    for place, part in enumerate(parts):
        title = f"Plots <small>{escaped(where(part))}</small>" if several else "Plots"
        own = _said((part.get("advice") or [])[1:]) if several else ""
        body += [f'<h2 id="plots-{place}">{title}</h2>', own, plots(part, f"p{place}")]
    if examples := report.get("examples"):
        body += [
            '<h2 id="texts">Who wrote what</h2>',
            "<p>Tinted and underlined: guessed by the draft and accepted. Plain: the target's own.</p>",
        ]
        body += ['<div class="texts">', *map(written, examples), "</div>"]
    for place, part in enumerate(parts):
        title = f"Tables <small>{escaped(where(part))}</small>" if several else "Tables"
        notes = [f"{name}: {note}" for name, one in part["candidates"].items() for note in one.get("notes") or ()]
        body += [f'<h2 id="tables-{place}">{title}</h2>', *map(as_html, tables(part)), _said(notes)]
    if meant := report.get("definitions"):
        body += ['<h2 id="words">What the words mean</h2>', words(meant)]
    body += ['<h2 id="how">How it was measured</h2>', words(_how(report)), "</main>"]
    return document(str(report.get("name") or "Draftsmith"), body, "draftsmith eval")


def document(title: str, body: Iterable[str], command: str) -> str:
    """A whole page around `body`, which is markup already."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escaped(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n'
        + "\n".join(one for one in body if one)
        + f"\n<footer>Written by <code>{escaped(command)}</code>. This file holds all it shows and asks nothing of any other.</footer>\n</body>\n</html>\n"
    )


def plots(part: dict[str, Any], key: str) -> str:
    """Every picture that the part has figures for."""
    shown = series(part)
    with drawing():
        made = [(each, one) for each, one in ((draw.__name__, draw(part, shown)) for draw in PICTURES) if one is not None]
        return f'<div class="plots">{"".join(_figure(one, f"{key}-{each}") for each, one in made)}</div>'


def words(meant: Mapping[str, Any]) -> str:
    return f'<dl class="words">{"".join(f"<dt>{escaped(word)}</dt><dd>{escaped(said)}</dd>" for word, said in meant.items())}</dl>'


def standing(speed: Any) -> str:
    """good, bad or wait, by where the interval lies; unknown without one."""
    low, high = number(speed, "low"), number(speed, "high")
    if low is None or high is None:
        return "unknown"
    return "good" if low > 1 else "bad" if high < 1 else "wait"


def _figure(one: Picture, key: str) -> str:
    return (
        f"<figure><h3>{escaped(one.title)}</h3>{legend(one.legend)}{inline(one.figure, key, one.alt)}"
        f"<figcaption>{escaped(one.caption)}</figcaption></figure>"
    )


def legend(names: Sequence[tuple[Series, str]]) -> str:
    """Who is who, with the shape as well as the colour."""
    who = "".join(
        f'<li><i class="s{one.colour}" aria-hidden="true">{GLYPHS[one.marker]}</i>{escaped(name)}</li>' for one, name in names
    )
    return f'<ul class="legend">{who}</ul>' if who else ""


def _header(report: Mapping[str, Any]) -> str:
    part, advice = report["parts"][0], leading(report, where)
    name = fastest(part)
    said = [
        f'<header><p class="eyebrow">What the drafts of {escaped(found(report, "how", "target") or "this target")} are worth</p>'
    ]
    said.append(f"<h1>{escaped(report.get('name') or 'Draftsmith')}</h1>")
    if name is not None:
        speed = part["candidates"][name]["all"]["speed_up"]
        how = standing(speed)
        said.append(f'<p class="standing {"wait" if how == "unknown" else how}">{STANDINGS[how]}</p>')
        first = (
            advice.pop(0)
            if advice
            else f"The fastest is {with_k(name, part['candidates'][name])}: {interval(speed)} times plain decoding."
        )
        said += [f'<p class="verdict">{escaped(together(first))}</p>', _tiles(part, name)]
    said.append(_said(advice))
    if guards := report.get("guards"):
        said.append(
            f'<section class="care"><h2>Read with care</h2><ul>{"".join(f"<li>{escaped(one)}</li>" for one in guards)}</ul></section>'
        )
    return "".join([*said, _nav(report), "</header>"])


def _tiles(part: Mapping[str, Any], name: str) -> str:
    """The four figures that one looks for, of the fastest candidate."""
    one = part["candidates"][name]
    low, high = number(one, "all", "speed_up", "low"), number(one, "all", "speed_up", "high")
    tiles = [("speed-up of the fastest", f"{number(one, 'all', 'speed_up', 'value'):.2f}{TIMES}", "" if low is None or high is None else f"95 % interval {low:.2f} to {high:.2f}")]  # fmt: skip
    if (tokens := number(one, "all", "tokens_per_call")) is not None:
        tiles.append(("tokens a call", f"{tokens:.2f}", "plain decoding: 1"))
    if (share := number(one, "all", "accepted_per_drafted")) is not None:
        tiles.append(("of its drafts accepted", f"{share:.0%}", f"{found(one, 'all', 'accepted'):,} of {found(one, 'all', 'drafted'):,}" if found(one, "all", "drafted") and found(one, "all", "accepted") is not None else ""))  # fmt: skip
    if compared := number(one, "all", "compared"):
        equal = number(one, "all", "equal") or 0
        tiles.append(("answers equal to plain", f"{equal:.0f} / {compared:.0f}", "token for token"))
    return f'<dl class="tiles">{"".join(f"<div><dt>{escaped(what)}</dt><dd>{escaped(value)}<small>{escaped(note)}</small></dd></div>" for what, value, note in tiles)}</dl>'


def _said(sentences: Sequence[str]) -> str:
    return f'<ul class="said">{"".join(f"<li>{escaped(one)}</li>" for one in sentences)}</ul>' if sentences else ""


def _nav(report: Mapping[str, Any]) -> str:
    there = [("plots-0", "Plots"), ("tables-0", "Tables"), ("words", "What the words mean"), ("how", "How it was measured")]
    if report.get("examples"):
        there.insert(1, ("texts", "Who wrote what"))
    return f'<nav aria-label="On this page">{"".join(f"<a href=#{where}>{what}</a>" for where, what in there)}</nav>'


def _how(report: Mapping[str, Any]) -> dict[str, str]:
    """The settings, a line each, in the order of the report; nested ones in a line."""
    said: dict[str, str] = {}
    for part in report["parts"]:
        kinds = f", {len(part['kinds'])} kinds of text" if len(part["kinds"]) > 1 else ""
        noise = interval(part, "noise")
        said[where(part)] = f"{part['answers']} answers{kinds}" + (f"; plain decoding against itself: {noise}" if noise else "")
    for key, value in (report.get("how") or {}).items():
        if isinstance(value, Mapping):
            value = value.get("said") or ", ".join(f"{name} {one}" for name, one in value.items())
        if value not in (None, ""):
            said[key.replace("_", " ")] = str(value)
    if report.get("training"):
        said["training"] = str(report["training"])
    return said
