"""`draftsmith eval`: measure a recipe's candidates and write report.json and report.md into the run folder."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftsmith.eval import metrics, report
from draftsmith.eval.bench import Arm, Measurement, measure
from draftsmith.eval.prompts import sample
from draftsmith.recipes import Recipe, read_prompts, runs
from draftsmith.recipes.files import write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.runs import find_draft
from draftsmith.specdec import Sampling, load, load_drafter
from draftsmith.specdec.drafters import exit_of
from draftsmith.specdec.places import revision
from draftsmith.specdec.prepare import prepare_for_decoding
from draftsmith.specdec.prepare import report as report_of


def run_eval(recipe: Recipe, show: bool = True) -> dict[str, Any]:
    """The report; it is printed, and written to the run folder as report.json and report.md."""
    settings, folder = recipe.eval, recipe.folder
    every = read_prompts(settings.prompts)
    prompts = sample(every, settings.per_kind)
    names = [one.called for one in settings.candidates]
    places = [place_of(folder, one.drafter) for one in settings.candidates]
    name = revision(recipe.target.model)
    for place in places:
        draft = place if Path(place).exists() else place.rpartition("+")[2]
        refuse_another_target(Path((exit_of(draft) or (draft, 0))[0]), name)
    torch.set_num_threads(settings.threads)
    target, tokenizer = load(recipe.target.model, recipe.target.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    arms = [
        Arm(called, load_drafter(place, target, tokenizer), one.k)
        for called, one, place in zip(names, settings.candidates, places, strict=True)
    ]
    how_prepared = prepare_all(target, arms) if settings.decoding == "prepared" else ""
    how = Sampling(**settings.sampling.model_dump())
    answers = sum(len(prompt.turns) for prompt in prompts)
    progress = Progress("measuring", answers, unit="answers")
    measured: list[Measurement] = []
    for done, some in enumerate(measure(target, tokenizer, prompts, arms, how, settings.max_new_tokens, settings.seed), 1):
        measured += some
        progress.at(done)
    progress.done()
    whole = _report(recipe, measured, arms, len(every), target, name, how_prepared)
    for called, place in zip(names, places, strict=True):
        whole["candidates"][called]["drafter"] = place
    whole["training"] = runs.passed_over(folder)
    write_whole(folder / "eval.yaml", recipe.dump())
    write_whole(folder / "report.json", json.dumps(whole, indent=1) + "\n")
    write_whole(folder / "report.md", report.markdown(whole))
    if show:
        for title, lines in (
            ("What the drafts are worth", report.rows(whole)),
            ("Tokens per call (speed-up) by kind", report.kinds(whole)),
        ):
            print_table(title, lines)
        if len(prompts) < len(every):
            print(f"{len(prompts)} of {len(every)} prompts; for all of them: {whole['how']['all_prompts_command']}")
        print(f"report: {folder / 'report.md'}")
    return whole


def _report(
    recipe: Recipe, measured: list[Measurement], arms: list[Arm], prompts_in_file: int, target: Any, name: str, prepared: str
) -> dict[str, Any]:
    settings = recipe.eval
    order = list(dict.fromkeys(m.category for m in measured))

    def figures(name: str, kind: str | None = None) -> dict[str, Any]:
        mine = [m for m in measured if m.drafter == name and kind in (None, m.category)]
        return metrics.summary(mine, settings.bootstrap, settings.seed)

    return {
        "schema": 1, "name": recipe.name, "prompts": len({m.prompt for m in measured}), "answers": len(measured) // len(arms), "kinds": order,
        "how": {
            "target": recipe.target.model, "target_revision": name, "dtype": recipe.target.dtype,
            "device": torch.cuda.get_device_name() if target.device.type == "cuda" else processor(), "threads": torch.get_num_threads(),
            "sampling": settings.sampling.model_dump(), "max_new_tokens": settings.max_new_tokens, "batch": 1, "seed": settings.seed, "prepared": prepared,
            "prompts": settings.prompts, "prompts_in_file": prompts_in_file, "bootstrap": settings.bootstrap,
            "all_prompts_command": f"{_program()} eval {recipe.folder / 'eval.yaml'} eval.per_kind=0",
            "versions": {name: metadata.version(name) for name in ("draftsmith", "torch", "transformers")},
        },
        "definitions": report.DEFINITIONS,
        "candidates": {
            arm.name: {"k": arm.k, "all": figures(arm.name), "kinds": {kind: figures(arm.name, kind) for kind in order}} for arm in arms
        },
        "measurements": [asdict(m) for m in measured],
    }  # fmt: skip


def place_of(folder: Path, drafter: str) -> str:
    """A candidate's name with the run's own draft in the place of `run:...`; the layer of an exit stays behind it."""
    lookup, plus, model = drafter.rpartition("+")
    which, colon, layer = model[4:].partition(":")
    return f"{lookup}{plus}{find_draft(folder, which)}{colon}{layer}" if model.startswith("run:") else drafter


def prepare_all(target: Any, arms: list[Arm]) -> str:
    """Baseline and candidates alike go through prepare_for_decoding; how that went."""
    for model in (target, *(arm.drafter.model for arm in arms if hasattr(arm.drafter, "model"))):
        prepare_for_decoding(model)
    done = report_of(target)
    return (
        f"prepared for decoding ({done.linears} linears, {done.norms} norms{'; ' + done.why_not if done.why_not else ''})"
        if done
        else ""
    )


def refuse_another_target(draft: Path, revision: str) -> None:
    """ValueError where a draft's drafter.json says that it was made from another target."""
    described = draft / "drafter.json"
    if not described.is_file():
        return
    made_for = json.loads(described.read_text(encoding="utf-8")).get("revision", revision)
    if made_for != revision:
        raise ValueError(
            f"{draft} was made from a target of revision {made_for}; this one has {revision}. Measure it with its own target"
        )


def _program() -> str:
    """How the reader called this program, so that what is printed can be pasted."""
    return sys.argv[0] if Path(sys.argv[0]).name == "draftsmith" else "draftsmith"


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def print_table(title: str, lines: list[list[str]]) -> None:
    head, *body = lines
    table = Table(title=title, title_justify="left")
    for place, one in enumerate(head):
        table.add_column(one, justify="left" if place == 0 else "right", no_wrap=place != 3)
    for line in body:
        table.add_row(*line)
    console = Console()
    # A pipe or a log has no width of its own; the table must not be folded to 80 columns there.
    (console if console.is_terminal else Console(width=150)).print(table)
