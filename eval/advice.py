"""What to do, in sentences, from the figures of a report: nothing here is measured, and nothing is said that a figure does not bear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.eval.reports import says_k


def advice(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Part by part: what to serve or that nothing pays, for which kinds of text, what it would take, which draft is the better."""
    if len(parts) == 1:
        return advice_of(parts[0])
    return [f"At {setting(part)}: {one}" for part in parts for one in _of(part)]


def advice_of(part: dict[str, Any]) -> list[str]:
    """A part's own, the verdict first."""
    return [one[0].upper() + one[1:] for one in _of(part)]


def setting(part: dict[str, Any]) -> str:
    it = part["setting"]
    return f"{it['prompts']}, temperature {it['temperature']:g}, batch {it['batch']}"


def _of(part: dict[str, Any]) -> list[str]:
    return [verdict(part), *_elsewhere(part), *_kinds(part), *_break_even(part), *_better(part), *_noise(part)]


def verdict(part: dict[str, Any]) -> str:
    name, speed = fastest(part)
    if not pays(speed):
        return (
            f"do not speculate: the best setting, {named(part, name)}, is {interval(speed)} times plain decoding{_why_not(speed)}."
        )
    return f"use {named(part, name)}: {interval(speed)} times plain decoding."


def leading(report: Mapping[str, Any], where: Callable[[dict[str, Any]], str]) -> list[str]:
    """What a report says first: all of its advice; of several parts a verdict each behind words for `where` it holds, if each part has the
    rest to say by itself."""
    parts = report["parts"]
    if len(parts) == 1 or not all(part.get("advice") for part in parts):
        return list(report.get("advice") or ())
    verdicts = [part["advice"][0] for part in parts]
    return [f"{where(part)}: {said[0].lower()}{said[1:]}" for part, said in zip(parts, verdicts, strict=True)]


def _elsewhere(part: dict[str, Any]) -> list[str]:
    """What the choice itself is worth, where there was one: the best of several is in part the luckiest."""
    chosen = part.get("chosen_elsewhere")
    if not pays(fastest(part)[1]) or len(part["candidates"]) < 2 or chosen is None or chosen["low"] is None:
        return []
    return [f"chosen on the other prompts each time, the fastest setting is worth {interval(chosen)}."]


def fastest(part: dict[str, Any], kind: str | None = None) -> tuple[str, dict[str, Any]]:
    speeds = {
        name: (one["kinds"][kind] if kind is not None else one["all"])["speed_up"] for name, one in part["candidates"].items()
    }
    name = max(speeds, key=lambda one: speeds[one]["value"])
    return name, speeds[name]


def pays(speed: dict[str, Any]) -> bool:
    """Is all of its interval above 1? Without an interval nobody knows."""
    return speed["low"] is not None and speed["low"] > 1


def named(part: dict[str, Any], name: str) -> str:
    """A candidate with its k, which its name may hold already."""
    k = part["candidates"][name]["k"]
    return name if says_k(name, k) else f"{name} with k = {k}"


def interval(speed: dict[str, Any]) -> str:
    if speed["low"] is None:
        return f"{speed['value']:.2f}"
    return f"{speed['value']:.2f} ({speed['low']:.2f}..{speed['high']:.2f})"


def _why_not(speed: dict[str, Any]) -> str:
    if speed["low"] is None:
        return "; an interval takes 3 prompts or more"
    return ", which is slower" if speed["high"] < 1 else ", which does not exclude 1"


def _kinds(part: dict[str, Any]) -> list[str]:
    if len(part["kinds"]) < 2:
        return []
    good: list[str] = []
    open_: list[str] = []
    bad: list[str] = []
    few: list[str] = []
    for kind in part["kinds"]:
        name, speed = fastest(part, kind)
        if speed["low"] is None:
            few.append(kind)
        elif pays(speed):
            good.append(f"{kind}: {named(part, name)}, {interval(speed)}")
        else:
            (bad if speed["high"] < 1 else open_).append(f"{kind} ({named(part, name)}: {interval(speed)})")
    said = [f"the best setting by kind of text: {'; '.join(good)}."] if good else []
    said += [f"do not speculate on {', '.join(open_)}: 1 is not excluded."] if open_ else []
    said += [f"do not speculate on {', '.join(bad)}: the best there is slower."] if bad else []
    return said + ([f"nothing can be said of {', '.join(few)} alone: fewer than 3 prompts."] if few else [])


def _break_even(part: dict[str, Any]) -> list[str]:
    """Of each drafter's fastest fixed k: the acceptance that its measured costs take, beside what it has."""
    best: dict[str, str] = {}
    for name, one in part["candidates"].items():
        if one["predicted"] is None or not one["all"]["drafted"]:
            continue
        had = best.get(one["drafter"])
        if had is None or one["all"]["speed_up"]["value"] > part["candidates"][had]["all"]["speed_up"]["value"]:
            best[one["drafter"]] = name
    said = []
    for name in best.values():
        one = part["candidates"][name]
        counts = one["all"]["acceptance_by_position"]
        has = sum(accepted for accepted, _ in counts) / sum(tried for _, tried in counts)
        least = one["predicted"]["break_even_alpha"]
        what = named(part, name)
        if least is None:
            said.append(f"no acceptance makes {what} pay, with its costs here; it has {has:.2f}.")
        else:
            said.append(f"the break-even of {what} is at an acceptance of {least:.2f} a draft; it has {has:.2f}.")
    return said


def _better(part: dict[str, Any]) -> list[str]:
    """The fastest against each other drafter; the other pairs are in report.json, for as a list they bury what is to be done."""
    said, first = [], fastest(part)[0]
    for one in part.get("against", ()):
        if one["a"] != first:
            continue
        a, b, ratio = named(part, one["a"]), named(part, one["b"]), interval(one)
        if pays(one):
            said.append(f"the better of two: {a}, {ratio} times the tokens a second of {b} on the same prompts.")
        else:
            said.append(f"not to be told apart: {a} and {b}, {ratio} on the same prompts.")
    return said


def _noise(part: dict[str, Any]) -> list[str]:
    noise = part.get("noise")
    if noise is None or noise["low"] is None:
        return []
    if noise["low"] <= 1 <= noise["high"]:
        name, speed = fastest(part)
        if not pays(speed) or speed["value"] > noise["high"]:
            return []
        return [
            f"beware: plain decoding against itself came out at {interval(noise)}, and the {speed['value']:.2f} of {named(part, name)} lies "
            "within that, so the clock alone could have made it; measure more prompts."
        ]
    return [
        f"the clock is not to be trusted to the last digit: plain decoding against itself came out at {interval(noise)}, which excludes 1."
    ]
