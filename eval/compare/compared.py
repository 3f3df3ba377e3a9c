"""Reports side by side: what each says of its candidates, and the others against the first on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.eval.compare.paired import Paired, answers, paired
from draftsmith.eval.compare.same import differences, lines_of, other_texts, same_setting
from draftsmith.eval.page.series import with_k
from draftsmith.eval.page.tables import Table
from draftsmith.eval.reports import NOTHING, fastest, interval, number, read_report, where

Named = tuple[str, Mapping[str, Any]]  # what a report is called here, and the report


class Compared(NamedTuple):
    """Tables of figures as they were reported, a table of ratios, and sentences: what was found, and what could not be compared."""

    reports: Sequence[Named]
    side_by_side: list[Table]
    ratios: Table | None
    found: list[str]
    not_compared: list[str]


def compare(places: Sequence[Path | str]) -> Compared:
    """Run folders or report.json files; ValueError from fewer than two, or where one is no report of this schema."""
    if len(places) < 2:
        raise ValueError(f"compare takes two reports or more, found {len(places)}: give run folders, or report.json files")
    read = [read_report(place) for place in places]
    names = [str(one.get("name") or place) for one, place in zip(read, places, strict=True)]
    reports = [
        (name if names.count(name) == 1 else f"{name} ({place})", one) for name, one, place in zip(names, read, places, strict=True)
    ]
    rows, said, left = [], [], []
    for other in reports[1:]:
        more, sentences, not_compared = _against(reports[0], other)
        rows += more
        said += sentences
        left += not_compared
    head = ["second / first", "setting", "prompts", "speed-up", "tokens a call"]
    return Compared(reports, _side_by_side(reports), Table("On the same prompts", head, rows) if rows else None, said, left)


def _side_by_side(reports: Sequence[Named]) -> list[Table]:
    """A table a setting that any report has: speed-up and tokens a call of each candidate, a column a report."""
    settings: list[Mapping[str, Any]] = []
    for _, report in reports:
        settings += [part for part in report["parts"] if not any(same_setting(part, one) for one in settings)]
    tables = []
    for setting in settings:
        parts = [next((part for part in report["parts"] if same_setting(part, setting)), None) for _, report in reports]
        candidates = dict.fromkeys(with_k(name, one) for part in parts if part for name, one in part["candidates"].items())
        cells = [{with_k(name, one): _cell(one) for name, one in part["candidates"].items()} if part else {} for part in parts]
        answers_of = ["answers", *(str(part["answers"]) if part else NOTHING for part in parts)]
        rows = [[name, *(one.get(name, NOTHING) for one in cells)] for name in candidates]
        tables.append(
            Table(f"Speed-up · tokens a call; {where(setting)}", ["drafter", *(name for name, _ in reports)], [*rows, answers_of])
        )
    return tables


def _cell(candidate: Mapping[str, Any]) -> str:
    speed, tokens = interval(candidate, "all", "speed_up"), number(candidate, "all", "tokens_per_call")
    return " · ".join([one for one in (speed, None if tokens is None else f"{tokens:.2f}") if one]) or NOTHING


def _against(first: Named, second: Named) -> tuple[list[list[str]], list[str], list[str]]:
    """Rows of ratios, what they say, and why there are no others."""
    (ours, a), (theirs, b) = first, second
    differ = differences(a, b)
    if differ.texts:
        return (
            [],
            [],
            [
                f"{theirs} and {ours} are not compared, for their texts were written under other settings ({'; '.join(differ.texts)})."
            ],
        )
    left = [f"{theirs} and {ours} were timed under other conditions ({'; '.join(differ.clocks)}): only tokens a call are compared."] if differ.clocks else []  # fmt: skip
    rows, said, met = [], [], False
    for part in a["parts"]:
        other = next((one for one in b["parts"] if same_setting(part, one)), None)
        if other is None:
            continue
        met = True
        for x, y in _pairs(part, other):
            mine, yours = lines_of(a, part, x), lines_of(b, other, y)
            if why := other_texts(part, other, mine, yours):
                left.append(f"{theirs} and {ours} are not compared at {where(part)}: {why}.")
                break
            result = paired(mine, yours, not differ.clocks) if answers(mine).keys() & answers(yours).keys() else None
            if result is None:
                left.append(f"{theirs} and {ours} have no prompt in common at {where(part)}.")
                break
            every = max(len({one["prompt"] for one in lines}) for lines in (mine, yours))
            what = f"{theirs}: {y} / {ours}: {x}"
            rows.append(
                [
                    what,
                    where(part),
                    f"{result.prompts} of {every}",
                    interval(result.speed_up) or NOTHING,
                    interval(result.tokens) or NOTHING,
                ]
            )
            if (x, y) == (fastest(part), fastest(other)):
                said.append(_sentence(theirs, ours, y, x, result, f" ({where(part)})" if len(a["parts"]) > 1 else ""))
    if not met:
        left.append(
            f"{theirs} and {ours} are not compared, for they share no prompts, temperature and batch ({_settings(b)} there, {_settings(a)} here)."
        )
    return rows, said, left


def _pairs(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fastest of both, then candidates that are the same setting under one name."""
    x, y = fastest(ours), fastest(theirs)
    pairs = [(x, y)] if x is not None and y is not None else []
    for name, one in ours["candidates"].items():
        other = theirs["candidates"].get(name)
        if other is not None and other["k"] == one["k"] and (name, name) not in pairs:
            pairs.append((name, name))
    return pairs


def _sentence(theirs: str, ours: str, y: str, x: str, result: Paired, at: str) -> str:
    what, worth = ("speed-up", result.speed_up) if result.speed_up else ("tokens a call", result.tokens)
    low, high = number(worth, "low"), number(worth, "high")
    on = f"on the same {result.prompts} prompt{'s' if result.prompts > 1 else ''}{at}"
    said = f"fastest, {y}, has {interval(worth)} times the {what} of {x} {on}."
    if low is None or high is None:
        return f"{theirs} and {ours} leave it open, for an interval takes 3 prompts: the {said}"
    if low <= 1 <= high:
        return f"{theirs} and {ours} are not to be told apart: of {theirs} the {said}"
    return f"{theirs} is {'ahead of' if low > 1 else 'behind'} {ours}: its {said}"


def _settings(report: Mapping[str, Any]) -> str:
    return "; ".join(where(part) for part in report["parts"])
