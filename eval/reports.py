"""report.json, read back: the schema that pages and comparisons are made from, and what may be missing from it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 2
TIMES, NOTHING = "\u00d7", "\u2013"  # behind a ratio; in a cell of which nothing is known


def read_report(place: Path | str) -> dict[str, Any]:
    """The report of a run folder, or of a report.json; ValueError where it is another thing or of another schema."""
    path = Path(place) / "report.json" if Path(place).is_dir() else Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"{place} holds no report.json; measure first: draftsmith eval RECIPE")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no report: it is not JSON ({error}). Measure again: draftsmith eval RECIPE") from error
    report = checked(found, str(path))
    if not isinstance(report.get("measurements"), list):
        raise ValueError(_damaged(str(path), ["measurements"]))
    return report


def checked(report: Any, where: str) -> dict[str, Any]:
    """`report` itself, if it is one of this schema."""
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != SCHEMA:
        what = f"a report of schema {schema}" if schema else "no report of draftsmith eval (it has no schema)"
        raise ValueError(
            f"{where} is {what}, and schema {SCHEMA} is read here. Measure again with this version: draftsmith eval RECIPE"
        )
    if not isinstance(report.get("parts"), list) or not report["parts"]:
        raise ValueError(f"{where} has no parts, so nothing was measured in it. Measure again: draftsmith eval RECIPE")
    lacks = [f"part {number}: {what}" for number, part in enumerate(report["parts"], 1) for what in _lacking(part)]
    if lacks:
        raise ValueError(_damaged(where, lacks))
    return dict(report)


def _damaged(where: str, lacks: list[str]) -> str:
    return f"{where} is damaged: it lacks {', '.join(lacks)}. Measure again: draftsmith eval RECIPE"


def _lacking(part: Any) -> list[str]:
    """What every part has and this one does not."""
    needs = {"setting": Mapping, "kinds": list, "candidates": Mapping}
    lacks = [what for what, kind in needs.items() if not isinstance(part, Mapping) or not isinstance(part.get(what), kind)]
    if "setting" not in lacks:
        lacks += [f"setting.{what}" for what in ("prompts", "temperature", "batch") if what not in part["setting"]]
    return lacks


def found(tree: Any, *path: str) -> Any:
    """What lies at `path`, or None where a step is missing: reports of other versions hold fewer figures."""
    for step in path:
        if not isinstance(tree, Mapping) or tree.get(step) is None:
            return None
        tree = tree[step]
    return tree


def number(tree: Any, *path: str) -> float | None:
    """The finite number at `path`, or None."""
    value = found(tree, *path)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def interval(tree: Any, *path: str) -> str | None:
    """{value, low, high} at `path` in words, the interval left out where there is none."""
    value, low, high = (number(tree, *path, end) for end in ("value", "low", "high"))
    if value is None:
        return None
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f}..{high:.2f})"


def where(part: Mapping[str, Any]) -> str:
    """A part's setting in words."""
    it = part["setting"]
    return f"{Path(str(it['prompts'])).name}, temperature {it['temperature']:g}, batch {it['batch']}"


def says_k(name: str, k: int | str) -> bool:
    """Does the name say this k? The 2 of `exit:2` is a layer, that of `v2` or `ngram:2` is none either."""
    said = rf"k\s*=\s*{re.escape(str(k))}" + ("|adaptive" if k == "adaptive" else "")
    return re.search(rf"(?<!\w)(?:{said})(?!\w)", name) is not None


def fastest(part: Mapping[str, Any]) -> str | None:
    """The candidate with the highest measured speed-up; None where no speed-up was measured."""
    speeds = {name: number(one, "all", "speed_up", "value") for name, one in part["candidates"].items()}
    known = {name: value for name, value in speeds.items() if value is not None}
    return max(known, key=lambda name: known[name]) if known else None
