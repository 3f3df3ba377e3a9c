"""From answers to the parts of a report: one for each prompt file, temperature and batch, pooled and never mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from draftsmith.eval import metrics
from draftsmith.eval.chosen import chosen_elsewhere
from draftsmith.eval.kept import Done, Kept, Part
from draftsmith.eval.measurement import AGAIN, Measurement
from draftsmith.eval.prediction.explained import explained, forecast, foretold, with_block
from draftsmith.recipes import Prompt
from draftsmith.recipes.eval_settings import Eval, Named

OF = {"model": "the draft", "combined": "its model", "lookup": None}  # whose teacher-forced acceptance it is


def lines(part: Part, groups: Sequence[list[Prompt]], kept: Kept) -> list[Done]:
    """All answers of a part, in the order of the plan."""
    found = [kept.find(part, group, turn) for group in groups for turn in range(len(group[0].turns))]
    return [one for one in found if one is not None]


def figures_of(
    part: Part,
    done: Sequence[Done],
    arms: Sequence[Named],
    places: Mapping[str, str],
    kept: Kept,
    settings: Eval,
    prompts_in_file: int,
) -> dict[str, Any]:
    """One part, ready for json."""
    by_arm: dict[str, list[Measurement]] = {}
    for one in (m for each in done for m in each.measured):
        by_arm.setdefault(one.drafter, []).append(one)
    again = by_arm.pop(AGAIN.name)
    measured = {arm.name: by_arm[arm.name] for arm in arms}
    candidates = {arm.name: _candidate(part, arm, places[arm.name], measured[arm.name], done, kept, settings) for arm in arms}
    speeds = {name: one["all"]["speed_up"]["value"] for name, one in candidates.items()}
    best: dict[str, str] = {}  # the fastest k of each drafter
    for name, candidate in candidates.items():
        drafter = candidate["drafter"]
        if drafter not in best or speeds[name] > speeds[best[drafter]]:
            best[drafter] = name
    return {
        "setting": part._asdict(), "prompts": len({m.prompt for m in again}), "prompts_in_file": prompts_in_file, "answers": len(again),
        "kinds": list(dict.fromkeys(m.category for m in again)),
        "small_batches": sum(len(each.group) < part.batch for each in done), "batches": len(done),
        "candidates": candidates,
        "noise": metrics.speed_up(again, settings.bootstrap, settings.seed)._asdict(),
        "against": [
            {"a": a, "b": b, **metrics.against(measured[a], measured[b], settings.bootstrap, settings.seed)._asdict()}
            for a, b in combinations(sorted(best.values(), key=lambda name: -speeds[name]), 2)
        ],
        "chosen_elsewhere": metrics.speed_up(chosen_elsewhere(measured), settings.bootstrap, settings.seed)._asdict(),
    }  # fmt: skip


def _candidate(
    part: Part, arm: Named, place: str, measured: list[Measurement], done: Sequence[Done], kept: Kept, settings: Eval
) -> dict[str, Any]:
    about = kept.about["arms"][arm.name]

    def figures(kind: str | None = None) -> dict[str, Any]:
        mine = [m for m in measured if kind in (None, m.category)]
        return metrics.summary(mine, settings.bootstrap, settings.seed, about["bytes_share"])

    everything = figures()
    fixed = int(arm.k) if arm.k != "adaptive" else None
    said = explained(measured, fixed, about["kind"] == "model") if fixed is not None else None
    if said is not None and fixed is not None:
        clocked = kept.clocks[part][0].costs[arm.name]
        said["forecast"] = forecast(measured, fixed, about["kind"] == "model", clocked)
        said["over_measured"] = said["speed_up"] / everything["speed_up"]["value"]
        said["r_by_tokens"] = [list(one) for one in clocked.widths]
    notes = sorted({note for each in done for note in each.notes.get(arm.name, ())})
    return {
        "drafter": place, "k": arm.k, "all": everything, "kinds": {kind: figures(kind) for kind in dict.fromkeys(m.category for m in measured)},
        "predicted": said, "teacher_forced": _forced(arm, place, about["kind"], measured, done, settings),
        "bytes": about["bytes"], "bytes_share": about["bytes_share"], "notes": notes,
    }  # fmt: skip


def _forced(
    arm: Named, place: str, kind: str, measured: list[Measurement], done: Sequence[Done], settings: Eval
) -> dict[str, Any] | None:
    of = OF[kind]
    rows = [(each.group[0], row[place]) for each in done for row in each.forced if place in row]
    if of is None or not rows:
        return None
    said, units = foretold(rows, arm.k, of)
    if said["alpha"] is not None:
        _, said["low"], said["high"] = metrics.interval(units.values(), settings.bootstrap, settings.seed)
    block = said["block_length"]
    said["speed_up"] = with_block(measured, int(arm.k), True, block) if block is not None else None
    return said | {"answers": len(rows), "answers_left_out": sum(len(each.group) for each in done) - len(rows)}


def examples_of(done: Sequence[Done], part: dict[str, Any]) -> list[dict[str, Any]]:
    """One answer of each kind, as the candidate that is the fastest on that kind wrote it."""
    shown = []
    for each in done:
        kinds = {m.prompt: m.category for m in each.measured}
        for prompt, written in each.pieces.items():
            speeds = {name: one["kinds"][kinds[prompt]]["speed_up"]["value"] for name, one in part["candidates"].items()}
            fastest = max(speeds, key=lambda name: speeds[name])
            shown.append({"prompt": prompt, "kind": kinds[prompt], "candidate": fastest, "pieces": written[fastest]})
    return shown
