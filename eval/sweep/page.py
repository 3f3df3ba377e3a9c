"""sweep.md: what to do in the first line, then all settings in a table, then how it was measured and what the words mean."""

from __future__ import annotations

from typing import Any

from draftsmith.eval.advice import interval as with_interval
from draftsmith.eval.report import equal

DEFINITIONS = {
    "alpha": "mean chance that a draft stays, along plain decoding's own answers; at temperature 0 the share of tokens that the draft would have said",
    "tokens/call": "tokens per call of the target, the prefill and its token included: predicted, then measured",
    "c": "a drafted token in plain steps (a plain step is one step of plain decoding: its call, and the loop around it)",
    "r": "the verifying call on k + 1 tokens in plain steps",
    "o": "what the loop adds to a round, in plain steps",
    "decoding": "S = tau / (k c + r + o), tau the predicted tokens a round: the predicted speed-up behind the prefill",
    "predicted": "the same for whole answers, prefill included: 1 / (f x + (1 - f) / S), f the prefill's share of plain decoding's time and x "
    "what a draft that reads the prompt too makes of it",
    "measured": "tokens a second over plain decoding's on the same prompts, prefill included, with the 95 % bootstrap interval over prompts",
    "equal": "answers that equal plain decoding's token for token, of those compared (temperature 0); in brackets the widest gap in nats "
    "between the target's two best tokens at a first difference",
}


def rows(sweep: dict[str, Any]) -> list[list[str]]:
    """The table, a row a setting, as text."""
    head = ["drafter", "k", "alpha", "tokens/call", "c", "r", "o", "decoding", "predicted", "measured", "equal"]
    return [head, *map(_row, sweep["cells"])]


def _row(cell: dict[str, Any]) -> list[str]:
    said, found = cell["predicted"], cell["measured"]
    cost = said["cost"]
    return [
        cell["drafter"], str(cell["k"]), f"{said['alpha']:.2f}", f"{said['tokens_per_call']:.2f}, {found['tokens_per_call']:.2f}",
        f"{cost['c']:.3f}", f"{cost['r']:.2f}", f"{cost['o']:.2f}", f"{said['decoding']:.2f}", f"{said['speed_up']:.2f}",
        with_interval(found["speed_up"]), equal(found),
    ]  # fmt: skip


def markdown(sweep: dict[str, Any]) -> str:
    """The sweep as a page."""
    how, versions = sweep["how"], sweep["how"]["versions"]
    head, *body = rows(sweep)
    table = "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(line) + " |" for line in body)]
    )
    text = [
        f"**{sweep['recommendation']['text']}**\n",
        f"# {len(sweep['drafters'])} drafters, k {', '.join(map(str, sweep['k']))}\n",
        "![speed-up by drafter and block length, predicted and measured](sweep.png)\n",
        table + "\n",
        "## How it was measured\n",
        f"Target `{how['target']}` ({how['target_revision']}), {how['dtype']}, {how['device']}, {how['threads']} thread(s), batch 1, temperature "
        f"{how['sampling']['temperature']}, {how['prepared'] or 'models as loaded'}, {how['max_new_tokens']} new tokens at most, {sweep['answers']} "
        f"answers to {sweep['prompts']} of {how['prompts_in_file']} prompts of `{how['prompts']}`. torch {versions['torch']}, transformers "
        f"{versions['transformers']}.\n",
        f"Measured: plain decoding and all settings on each prompt in turn, through the same loop and clock. Predicted: the chances from one pass of "
        f"each drafter along plain decoding's answers, the costs from about {how['clocked_rounds']} rounds of each setting on {how['clocked_prompts']} "
        f"of the prompts. A plain step took {sweep['plain_step_ms']:.1f} ms; the prefill is {sweep['prefill_share']:.0%} of plain decoding's time. "
        f"Predicted over measured: {sweep['error']['low']:.2f} to {sweep['error']['high']:.2f}, in the middle {sweep['error']['middle']:.2f}.\n",
        "## What the words mean\n",
        *(f"- **{word}**: {meaning}." for word, meaning in DEFINITIONS.items()),
    ]
    return "\n".join(text) + "\n"
