"""What training exits was worth: the part `training` of early_exit.py, a sweep over the stages of a run and what stands beside them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.eval.sweep.asked import Asked
from draftsmith.eval.sweep.run import run_sweep
from draftsmith.recipes import runs

TRAINED = {"closed form": "warm", "trained": "best"}  # a stage, and what a run calls its folder


def training(asked: argparse.Namespace) -> dict[str, Any]:
    """Each exit as it is, after the closed form and trained: chances, tokens a call, speed-up predicted and measured."""
    run, draft = Path(asked.run), asked.draft
    if not (run / "recipe.yaml").is_file():
        raise FileNotFoundError(f"{run} holds no recipe.yaml; name a run with --run, as recipes/early_exit.yaml makes one")
    arms = {(layer, "untrained"): f"exit:{layer}" for layer in asked.exits}
    arms |= {(layer, name): f"{runs.find_draft(run, which)}:{layer}" for name, which in TRAINED.items() for layer in asked.exits}
    if draft:
        arms["draft", "stand-alone"] = str(
            runs.find_draft(Path(draft), "best") if (Path(draft) / "best.json").is_file() else Path(draft)
        )
    arms["n-gram", "lookup"] = "ngram"
    sweep = run_sweep(
        Asked(
            target=asked.target, prompts=asked.prompts, drafters=tuple(arms.values()), k=tuple(asked.k), per_kind=asked.per_kind,
            max_new_tokens=asked.tokens, decoding="as_loaded" if asked.as_loaded else "prepared", out=str(run / "worth"),
        ),
        show=False,
    )  # fmt: skip
    cells = {(one["drafter"], one["k"]): one for one in sweep["cells"]}
    rows = [
        {"of": str(of), "stage": stage, "k": k, **_worth(cells[name, k]), "held_out": _held_out(run, of, stage)}
        for (of, stage), name in sorted(arms.items(), key=lambda one: str(one[0][0])) for k in asked.k
    ]  # fmt: skip
    found = {"how": sweep["how"], "trained": _trained(run), "plain_step_ms": sweep["plain_step_ms"], "rows": rows}
    show_training(found)
    return found


def _worth(cell: dict[str, Any]) -> dict[str, Any]:
    """What is told of one setting; `chance` is that of a first draft behind every token of the target's own greedy answers."""
    said, measured = cell["predicted"], cell["measured"]
    return {
        "chance": said["alpha"], "accepted_per_drafted": measured["accepted_per_drafted"], "tokens_per_call": measured["tokens_per_call"],
        "c": said["cost"]["c"], "predicted": said["speed_up"], "measured": measured["speed_up"], "equal": measured["equal"],
        "compared": measured["compared"],
    }  # fmt: skip


def _held_out(run: Path, of: int | str, stage: str) -> dict[str, float] | None:
    """Figures on the run's held-out rows, at temperature 1 too, as its training wrote them beside each exit."""
    folder = runs.find_draft(run, {"untrained": "untrained", **TRAINED}[stage]) if isinstance(of, int) else None
    if folder is None:
        return None
    exits = json.loads((folder / "drafter.json").read_text(encoding="utf-8"))["settings"]["exits"]
    mine = next(one for one in exits if one["layer"] == of)
    if stage == "untrained" and mine["head"] != "adapter":
        return None  # what begins as another layer is not the exit with the target's own norm and head
    return mine.get("held_out")


def _trained(run: Path) -> dict[str, Any]:
    """How long the run learned, on what, from its own files."""
    about = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "tokens_per_second" in line]
    seconds = sum(one["scored"] / one["tokens_per_second"] for one in steps)
    kept = ("commit", "threads", "processes", "draft", "trainable_parameters", "rows", "held_out_rows", "scored_tokens", "versions")
    return {name: about.get(name) for name in kept} | {
        "steps": len(steps), "tokens": sum(one["scored"] for one in steps), "seconds_in_steps": seconds,
        "best": json.loads((run / "best.json").read_text(encoding="utf-8"))["step"],
    }  # fmt: skip


def show_training(found: dict[str, Any]) -> None:
    told = found["trained"]
    title = f"{told['tokens']} scored tokens in {told['seconds_in_steps'] / 60:.1f} min of steps on {told['threads']} threads; {told['draft']}"
    table = Table(title=title, title_justify="left")
    for name in ("", "stage", "k", "held out, T = 1", "first drafts kept", "tokens a call", "c", "predicted", "measured", "equal"):
        table.add_column(name, justify="left" if name in ("", "stage") else "right")
    for row in found["rows"]:
        speed, kept = row["measured"], row["held_out"]
        ends = "" if speed["low"] is None else f" ({speed['low']:.2f}..{speed['high']:.2f})"
        table.add_row(
            f"exit {row['of']}" if row["of"].isdigit() else row["of"], row["stage"], str(row["k"]), f"{kept['acceptance']:.3f}" if kept else "",
            f"{row['chance']:.3f}", f"{row['tokens_per_call']:.2f}", f"{row['c']:.3f}", f"{row['predicted']:.2f}", f"{speed['value']:.2f}{ends}",
            f"{row['equal']}/{row['compared']}",
        )  # fmt: skip
    Console(width=150).print(table)
