"""report.md: what to do, what was measured in tables, how, and what each word means."""

from __future__ import annotations

from typing import Any

from draftsmith.eval.advice import interval, leading, setting

DEFINITIONS = {
    "tokens/call": "tokens emitted per call of the target, the prefill and its own tokens included; plain decoding is 1",
    "acc. by position": "share of drafts accepted at each drafted position, of those calls in which all drafts before were accepted",
    "acc./drafted": "accepted drafts over all drafts",
    "draft ms": "milliseconds a drafted token takes, drafting and bookkeeping together, and the rounds in which a lookup finds nothing",
    "target ms": "milliseconds of a verifying call of the target (k+1 tokens) behind the prefill, acceptance included; plain decoding's call has one token",
    "speed-up": "tokens a second over plain decoding's on the same prompts, prefill included, with the 95 % bootstrap interval over prompts",
    "equal": "answers that equal plain decoding's token for token, of those compared (temperature 0); where some differ, in brackets the "
    "widest gap in nats between the target's two best tokens at a first difference (rounding in half precision parts near ties)",
    "tau": "tokens a round behind the prefill, the target's own (the bonus) token included, with its interval; without it: accepted drafts a round",
    "acceptance length": "1 + accepted / drafts, a call without a draft being none: vLLM's mean acceptance length",
    "histogram": "calls by how many of their drafts were accepted, 0 first; calls without a draft are left out, as in vLLM's counters",
    "alpha": "teacher-forced: the mean of sum min(p, q) over every token behind the prefill's of plain decoding's answers, one pass and no "
    "decoding, both laws under the temperature, top-k and top-p that were served; of a combined drafter its model's alone, of a lookup none",
    "block length": "teacher-forced: the tokens a round that these laws lead to along plain decoding's answers, to be held against tau",
    "c": "a drafted token in plain steps (a plain step is one step of plain decoding: its call, and the loop around it)",
    "r": "the verifying call in plain steps, for the widths that came about; r(n) by tokens fed, clocked beforehand, is in report.json",
    "o": "what the loop adds to a round, in plain steps",
    "forecast": "whole answers by S = tau / (k c + r + o) and the prefill: rounds and drafts as they came about, costs of a few rounds that were clocked "
    "before any answer was written. None for an adaptive k",
    "predicted": "the same at the costs of the answers, each half of the prompts at those of the other half: whether the model of a round leaves nothing out; "
    "teacher-forced: the same with the block length in the place of tau, at the costs of all. None for an adaptive k",
    "break-even": "the acceptance, alike at all positions, at which rounds with drafts of the lengths that were had here yield as many tokens as "
    "the plain steps that they cost",
    "MBSU": "memory-bound speed-up, tau / (1 + d c_P): d drafted tokens a round, c_P the bytes of the draft that a step reads over the target's",
    "first token": "milliseconds from the call to an answer's first token, in the mean; plain decoding's behind the stroke",
    "per token": "milliseconds between tokens behind the first, pooled over tokens; plain decoding's behind the stroke",
    "answer": "milliseconds from the call to an answer's last token, in the mean; plain decoding's behind the stroke",
    "peak": "the most memory held during a call, with all candidates' models loaded: of the process, or of torch's tensors on a GPU",
    "noise": "plain decoding's second run against its first, as if it were a candidate: a speed-up within this interval is none",
    "the better of two": "tokens a second of one over another's on the same prompts, which the interval draws for both at once; each drafter at its fastest k",
    "chosen on the other prompts": "on each prompt the setting that is fastest on all the others: what choosing is worth where nothing was tried before",
    "batch": "prompts decoded together, by plain decoding too; a row's seconds are its equal share, and the interval's unit is the batch",
}


def rows(part: dict[str, Any]) -> list[list[str]]:
    """The main table, a row a candidate, as text."""
    table = [["drafter", "k", "tokens/call", "acc. by position", "acc./drafted", "draft ms", "target ms", "speed-up", "equal"]]
    first = next(iter(part["candidates"].values()))["all"]
    table.append(["plain decoding", "", "1.00", "", "", "", _number(first["baseline_ms"], 0), "1", ""])
    for name, one in part["candidates"].items():
        figures = one["all"]
        table.append([
            name, str(one["k"]), f"{figures['tokens_per_call']:.2f}", by_position(figures["acceptance_by_position"]),
            "-" if figures["accepted_per_drafted"] is None else f"{figures['accepted_per_drafted']:.2f}",
            _number(figures["draft_ms"], 1), _number(figures["target_ms"], 0), interval(figures["speed_up"]),
            equal(figures),
        ])  # fmt: skip
    return table


def kinds(part: dict[str, Any]) -> list[list[str]]:
    """Tokens per call and speed-up by kind of text, a row a kind, as text."""
    candidates = part["candidates"]
    table = [["kind", *candidates]]
    for kind in [*part["kinds"], None]:
        cells = [one["all"] if kind is None else one["kinds"][kind] for one in candidates.values()]
        table.append([kind or "all", *(f"{cell['tokens_per_call']:.2f} ({cell['speed_up']['value']:.2f}x)" for cell in cells)])
    return table


def predictions(part: dict[str, Any]) -> list[list[str]]:
    """What a round costs and what follows from it, beside what was measured."""
    table = [[
        "drafter", "tau", "block length", "alpha", "c", "r", "o", "forecast", "predicted", "teacher-forced", "speed-up", "break-even", "MBSU",
    ]]  # fmt: skip
    for name, one in part["candidates"].items():
        said, told, figures = one["predicted"] or {}, one["teacher_forced"] or {}, one["all"]
        table.append([
            name, interval(figures["tau"]) if figures.get("tau") else "-", _number(told.get("block_length")), _number(told.get("alpha")),
            _number(said.get("c"), 3), _number(said.get("r")), _number(said.get("o"), 3), _number(said.get("forecast")),
            _number(said.get("speed_up")), _number(told.get("speed_up")), _number(figures["speed_up"]["value"]), _number(said.get("break_even_alpha")), _number(figures.get("mbsu")),
        ])  # fmt: skip
    return table


def waits(part: dict[str, Any]) -> list[list[str]]:
    """What a client waits for, and the memory it takes; plain decoding's behind the stroke."""
    table = [["drafter", "first token", "per token", "answer", "peak", "acceptance length", "histogram"]]
    for name, one in part["candidates"].items():
        it = one["all"]
        pairs = [(it.get(what), it.get(f"baseline_{what}")) for what in ("first_token_ms", "per_token_ms", "answer_ms")]
        peaks = [f"{it[what] / 1e6:.0f}" for what in ("peak_bytes", "baseline_peak_bytes") if it.get(what)]
        table.append([
            name, *(f"{_number(ours, 1)} / {_number(theirs, 1)} ms" for ours, theirs in pairs), f"{' / '.join(peaks)} MB" if peaks else "-",
            _number(it.get("mean_acceptance_length")), " ".join(map(str, it.get("histogram") or ())) or "-",
        ])  # fmt: skip
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def by_position(counts: list[tuple[int, int]]) -> str:
    return " ".join(f"{accepted / tried:.2f}" if tried else "-" for accepted, tried in counts)


def equal(figures: dict[str, Any]) -> str:
    if not figures["compared"]:
        return "not compared"
    widest = f" ({figures['gaps'][0]:.3f})" if figures.get("gaps") else ""
    return f"{figures['equal']}/{figures['compared']}{widest}"


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    first = [*leading(report, setting), *report["guards"]]
    text = [f"# {report['name']}: what the drafts are worth\n", *(f"- {one}" for one in first), ""]
    for part in report["parts"]:
        if len(report["parts"]) > 1:
            text += [f"## {setting(part)}\n", *(f"- {one}" for one in part.get("advice", ())), ""]
        text += [
            _table(rows(part)), "Tokens per call (and speed-up) by kind of text:\n", _table(kinds(part)),
            "What a round costs, and the speed-up that follows:\n", _table(predictions(part)),
            "What a client waits for, and calls by accepted drafts:\n", _table(waits(part)),
        ]  # fmt: skip
        if part.get("noise"):
            text.append(f"Plain decoding against itself: {interval(part['noise'])}.\n")
        text += [f"- {name}: {note}" for name, one in part["candidates"].items() for note in one.get("notes", ())]
    text += ["## How it was measured\n", *_how(report), "## What the words mean\n"]
    text += [f"- **{word}**: {meaning}." for word, meaning in report["definitions"].items()]
    return "\n".join(text) + "\n"


def _how(report: dict[str, Any]) -> list[str]:
    how = report["how"]
    said = [
        f"Target `{how['target']}` ({how['target_revision']}), {how['dtype']}, {how['device']}, {how['threads']} thread(s), "
        f"{how.get('prepared') or 'models as loaded'}, {how['max_new_tokens']} new tokens at most{_sampling(report)}. Plain decoding, twice, and all candidates ran on each "
        f"prompt in turn, through the same loop. torch {how['versions']['torch']}, transformers {how['versions']['transformers']}.\n",
    ]
    for part in report["parts"]:
        few = f"; {part['small_batches']} of {part['batches']} batches were smaller" if part.get("small_batches") else ""
        said.append(f"- {setting(part)}: {part['answers']} answers to {part['prompts']} of {part['prompts_in_file']} prompts{few}.")
    if how.get("time"):
        said.append(f"\n{how['time']['said']}\n")
    if report.get("training"):
        said.append(f"\nIn the training of this run {report['training']}.\n")
    if any(part["prompts"] < part["prompts_in_file"] for part in report["parts"]):
        said.append(f"\nThis is a sample. For all prompts: `{how['all_prompts_command']}`\n")
    return said


def _sampling(report: dict[str, Any]) -> str:
    """What draws are made from, where any are."""
    if all(part["setting"]["temperature"] == 0 for part in report["parts"]):
        return ""
    how = report["how"]
    top_k, top_p = how["sampling"]["top_k"], how["sampling"]["top_p"]
    said = ([f"top-k {top_k}"] if top_k else []) + ([f"top-p {top_p:g}"] if top_p < 1 else [])
    return f"; above temperature 0 drawn from {', '.join(said) if said else 'the whole law'}, seed {how['seed']}"


def _table(lines: list[list[str]]) -> str:
    head, *body = lines
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(out + ["| " + " | ".join(line) + " |" for line in body]) + "\n"
