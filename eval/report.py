"""report.json and report.md: what was measured, how, and what each word means."""

from __future__ import annotations

from typing import Any

DEFINITIONS = {
    "tokens/call": "tokens emitted per call of the target, the prefill and its own tokens included; plain decoding is 1",
    "acc. by position": "share of drafts accepted at each drafted position, of those calls in which all drafts before were accepted",
    "acc./drafted": "accepted drafts over all drafts",
    "draft ms": "milliseconds a drafted token takes, drafting and bookkeeping together",
    "target ms": "milliseconds of a verifying call of the target (k+1 tokens), acceptance included; plain decoding's call has one token",
    "speed-up": "tokens a second over plain decoding's on the same prompts, prefill included, with the 95 % bootstrap interval over prompts",
    "equal": "answers that equal plain decoding's token for token, of those compared (temperature 0); where some differ, in brackets the "
    "widest gap in nats between the target's two best tokens at a first difference (rounding in half precision parts near ties)",
}


def rows(report: dict[str, Any]) -> list[list[str]]:
    """The main table, a row a candidate, as text."""
    table = [["drafter", "k", "tokens/call", "acc. by position", "acc./drafted", "draft ms", "target ms", "speed-up", "equal"]]
    first = next(iter(report["candidates"].values()))["all"]
    table.append(["plain decoding", "", "1.00", "", "", "", f"{first['baseline_ms']:.0f}", "1", ""])
    for name, one in report["candidates"].items():
        figures = one["all"]
        table.append([
            name, str(one["k"]), f"{figures['tokens_per_call']:.2f}", by_position(figures["acceptance_by_position"]),
            "-" if figures["accepted_per_drafted"] is None else f"{figures['accepted_per_drafted']:.2f}",
            f"{figures['draft_ms']:.1f}", f"{figures['target_ms']:.0f}", with_interval(figures["speed_up"]),
            equal(figures),
        ])  # fmt: skip
    return table


def kinds(report: dict[str, Any]) -> list[list[str]]:
    """Tokens per call and speed-up by kind of text, a row a kind, as text."""
    candidates = report["candidates"]
    table = [["kind", *candidates]]
    for kind in report["kinds"]:
        cells = [one["kinds"][kind] for one in candidates.values()]
        table.append([kind, *(f"{cell['tokens_per_call']:.2f} ({cell['speed_up']['value']:.2f}x)" for cell in cells)])
    table.append(
        ["all", *(f"{one['all']['tokens_per_call']:.2f} ({one['all']['speed_up']['value']:.2f}x)" for one in candidates.values())]
    )
    return table


def by_position(counts: list[tuple[int, int]]) -> str:
    return " ".join(f"{accepted / tried:.2f}" if tried else "-" for accepted, tried in counts)


def equal(figures: dict[str, Any]) -> str:
    if not figures["compared"]:
        return "not compared"
    widest = f" ({figures['gaps'][0]:.3f})" if figures.get("gaps") else ""
    return f"{figures['equal']}/{figures['compared']}{widest}"


def with_interval(speed: dict[str, float | None]) -> str:
    if speed["low"] is None:
        return f"{speed['value']:.2f}"
    return f"{speed['value']:.2f} ({speed['low']:.2f}..{speed['high']:.2f})"


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    how = report["how"]
    text = [
        f"# {report['name']}: what the drafts are worth\n",
        f"Target `{how['target']}` ({how['target_revision']}), {how['dtype']}, {how['device']}, {how['threads']} thread(s), batch 1, "
        f"temperature {how['sampling']['temperature']}, {how.get('prepared') or 'models as loaded'}, {how['max_new_tokens']} new tokens at most, {report['answers']} answers to {report['prompts']} of "
        f"{how['prompts_in_file']} prompts of `{how['prompts']}`. Plain decoding and all candidates ran on each prompt in turn, through the same loop. "
        f"torch {how['versions']['torch']}, transformers {how['versions']['transformers']}.\n",
    ]
    if report.get("training"):
        text.append(f"In the training of this run {report['training']}.\n")
    if report["prompts"] < how["prompts_in_file"]:
        text.append(f"This is a sample. For all prompts: `{how['all_prompts_command']}`\n")
    text += [
        _table(rows(report)),
        "Tokens per call (and speed-up) by kind of text:\n",
        _table(kinds(report)),
        verdict(report),
        "## What the words mean\n",
    ]
    text += [f"- **{word}**: {meaning}." for word, meaning in DEFINITIONS.items()]
    return "\n".join(text) + "\n"


def verdict(report: dict[str, Any]) -> str:
    """Which candidate is worth it, or that none is."""
    best, figures = max(
        ((name, one["all"]) for name, one in report["candidates"].items()), key=lambda pair: pair[1]["speed_up"]["value"]
    )
    speed = figures["speed_up"]
    if speed["low"] is not None and speed["low"] > 1:
        return f"**Worth it here:** {best}, {with_interval(speed)} times plain decoding.\n"
    if speed["high"] is not None and speed["high"] < 1:
        return f"**Do not speculate here:** every candidate is slower than plain decoding; the least slow is {best}, {with_interval(speed)}.\n"
    return f"**No gain shown here:** the fastest candidate is {best}, {with_interval(speed)} times plain decoding, which does not exclude 1.\n"


def _table(lines: list[list[str]]) -> str:
    head, *body = lines
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(out + ["| " + " | ".join(line) + " |" for line in body]) + "\n"
