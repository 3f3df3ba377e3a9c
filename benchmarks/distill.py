"""The distiller against the others': the same pair, the same rows, the same wall clock; each arm in a process of its own.

    pip install -e '.[bench]'
    python benchmarks/distill.py [--minutes 4] [--turns 3] [--threads 1] [--out docs/measured/distill.json]

Every arm starts from the same four layers of SmolLM2-135M and reads the same rows in the same order. Its clock starts when
models, libraries and data are loaded, so a warm start and the storing of a teacher count. What is left of the time is training. Then the
acceptance (sum min(p, q), whole laws) is measured for all by one function, on rows that nothing was chosen by: others' learning rates
and our ridge are chosen on other held-out rows. Memory is the process's peak before that. The others train the tied embedding and head
as well, as their users do; ours leaves them to the target. Tests assert none of this: it is for a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from distill_arms import ARMS, BATCH, TARGET, Job
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from draftsmith.distill import DistillDraft, LiveTeacher, collate
from draftsmith.recipes.files import write_whole
from draftsmith.specdec import load
from draftsmith.specdec.places import revision
from draftsmith.train.data.chats import of_answers
from draftsmith.train.data.plan import to_rows
from draftsmith.train.data.prepare import identity, read_answers
from draftsmith.train.stored.states import StoredTeacher


def one_arm(name: str, seconds: float, rate: float, seed: int, some: int, heard: Path) -> dict[str, Any]:
    """Run in a fresh process: train, then judge; the target is heard on the held-out rows once for all arms of a seed, in `heard`."""
    torch.manual_seed(seed)
    target, tokenizer = load(TARGET)
    answers = read_answers(Path("recipes/data/smollm2-135m.jsonl"), identity(revision(TARGET), tokenizer))
    rows = to_rows(of_answers(answers), tokenizer, 1024, 0.1, seed, some)
    chooses, judges = rows.held_out[::2], rows.held_out[1::2]
    run, own = ARMS[name]
    trained = run(Job(target, tokenizer, rows._replace(held_out=chooses), seconds, rate or own, seed))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    teacher = StoredTeacher(LiveTeacher(target), heard / f"seed-{seed}", rows.held_out, revision(TARGET), Accelerator(cpu=True))
    judged, chosen = (judge(trained.draft, teacher, held) for held in (judges, chooses))
    return {
        "arm": name, "rate": rate or own, "seed": seed, "steps": trained.steps, "tokens": trained.tokens, "training_seconds": trained.seconds,
        "tokens_per_second": trained.tokens / trained.seconds, "tokens_per_second_of_all": trained.tokens / seconds, "peak_bytes": peak,
        "acceptance": judged["acceptance"], "agreement": judged["agreement"], "judged": judged["judged"], "chosen_by": chosen["acceptance"],
    }  # fmt: skip


def judge(draft: PreTrainedModel, teacher: StoredTeacher, rows: list[Any]) -> dict[str, float]:
    """Acceptance and agreement over the scored tokens of `rows`, and how many these are."""
    objective = DistillDraft(draft, teacher)
    objective.trainable.eval()
    sums = {"acceptance": 0.0, "agreement": 0.0, "judged": 0.0}
    with torch.no_grad():
        for row in rows:
            metrics = objective.loss(collate([row])).metrics
            sums = {what: value + float(metrics[what]) for what, value in sums.items()}
    return {what: value / (sums["judged"] if what != "judged" else 1) for what, value in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0, help="of wall clock an arm, its preparation included")
    parser.add_argument("--turns", type=int, default=1, help="all arms in turn so many times, with another seed each")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[3e-4, 1.2e-3, 3e-3],
        help="learning rates that the others may choose from, in the first turn",
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=120, help="to train on: about what the slowest arm gets through")
    parser.add_argument("--out", default="docs/measured/distill.json", help="an interrupted call goes on with what is there")
    parser.add_argument("--heard", default="", help=argparse.SUPPRESS)
    parser.add_argument("--arm", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        torch.set_num_threads(asked.threads)
        print("\n" + json.dumps(one_arm(asked.arm, 60 * asked.minutes, asked.rate, asked.seed, asked.rows, Path(asked.heard))))
        return
    how = {"minutes": asked.minutes, "threads": asked.threads, "rows": asked.rows, "batch": BATCH}
    out, found = Path(asked.out), []
    if out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
        found = before["runs"] if before["how"] == how else []
    with tempfile.TemporaryDirectory() as heard:
        for seed in range(asked.turns):
            for name, (_, own) in ARMS.items():
                for rate in [own] if own else asked.rates if seed == 0 else [best_rate(found, name)]:
                    if not any((one["arm"], one["rate"], one["seed"]) == (name, rate, seed) for one in found):
                        found.append(_apart({"arm": name, "rate": rate, "seed": seed, "heard": heard} | how))
                        print(json.dumps(found[-1]), flush=True)
                        write_whole(out, json.dumps({"how": how, "runs": found}, indent=1) + "\n")
    show(found)


def _apart(told: dict[str, Any]) -> dict[str, Any]:
    """One arm in a process of its own."""
    words = [str(word) for what, value in told.items() if what != "batch" for word in (f"--{what}", value)]
    said = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if said.returncode:
        raise SystemExit(f"{told['arm']}: {said.stderr[-2000:]}")
    return dict(json.loads(said.stdout.strip().splitlines()[-1]))


def best_rate(found: list[dict[str, Any]], name: str) -> float:
    """Of those that an arm tried in the first turn, the one with the best acceptance on the rows that choose."""
    return float(max((one for one in found if one["arm"] == name), key=lambda one: one["chosen_by"])["rate"])


def show(found: list[dict[str, Any]]) -> None:
    """Medians over the turns; of the others at the rate that was best in the first."""
    table = Table(title="After the same wall clock", title_justify="left")
    for name in ("arm", "rate", "scored tokens/s", "all the time counted", "peak GB", "acceptance", "agreement"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for name in ARMS:
        mine = [one for one in found if one["arm"] == name]
        best = best_rate([one for one in mine if one["seed"] == 0], name)
        some = [one for one in mine if one["rate"] == best]
        middle = {
            what: statistics.median(one[what] for one in some)
            for what in ("tokens_per_second", "tokens_per_second_of_all", "peak_bytes", "acceptance", "agreement")
        }
        table.add_row(
            name, f"{best:g}", f"{middle['tokens_per_second']:.0f}", f"{middle['tokens_per_second_of_all']:.0f}", f"{middle['peak_bytes'] / 1e9:.2f}", f"{middle['acceptance']:.3f}",
            f"{middle['agreement']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
