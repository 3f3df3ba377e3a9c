"""The teachers side by side: the live target, its kept states and its kept likeliest ids; the same draft, rows and steps for each.

    python benchmarks/teachers.py [--steps 30] [--seeds 3] [--k 32] [--out docs/measured/teachers.json]

Says what a scored token takes on disk, what it costs to write, scored tokens a second of training, and the held-out acceptance that is
reached. Live and states see the same numbers; the top k are what may differ.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from losses import BATCH, LAYERS, TARGET, Pair, interval, options, trained
from rich.console import Console
from rich.table import Table

from draftsmith.distill.teacher import Teacher
from draftsmith.recipes.files import write_whole
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.places import revision
from draftsmith.train.stored.listened import ListenedTeacher, ask_live
from draftsmith.train.stored.store import about_store, write_store


def listened(pair: Pair, folder: Path, k: int) -> tuple[ListenedTeacher, float, float]:
    """A top-k store of the pair's rows: its reader, bytes a scored token, and the seconds that writing it took (from kept states)."""
    clock, target = time.perf_counter(), pair.live.target
    about = about_store(TARGET, revision(TARGET), pair.tokenizer, "fp32", output_rows(target), k, 1.0, pair.support)
    write_store(folder, pair.rows, ask_live(pair.teacher, k, 1.0, pair.support), about, Accelerator(cpu=True))  # type: ignore[arg-type]
    seconds, tokens = time.perf_counter() - clock, sum(row.scored for row in pair.rows)
    size = sum(path.stat().st_size for path in folder.glob("said-*.parquet"))
    return ListenedTeacher(folder, about, pair.rows, pair.support), size / tokens, seconds


def main() -> None:
    parser = options((__doc__ or "").splitlines()[0], "docs/measured/teachers.json")
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--live-seeds", type=int, default=1, help="live is slow, and its numbers are those of states")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        pair = Pair(Path(asked.states), asked.rows)
        width = pair.live.head.linear.weight.shape[1]
        top, bytes_each, seconds = listened(pair, Path(place) / "said", asked.k)
        print(f"top {asked.k}: {bytes_each:.0f} bytes a token, written in {seconds:.0f} s; states: {4 * width}", flush=True)
        arms: dict[str, tuple[Teacher, float]] = {
            "states": (pair.teacher, 4.0 * width), f"stored, top {asked.k}": (top, bytes_each), "live": (pair.live, 0.0),
        }  # fmt: skip
        for seed in range(asked.seeds):
            for name, (teacher, size) in arms.items():
                if name == "live" and seed >= asked.live_seeds:
                    continue
                figures = trained(pair, {"forward_kl": 1}, seed, asked.steps, asked.rate, teacher)
                found.append({"teacher": name, "seed": seed, "bytes_a_token": size} | figures)
                print(found[-1], flush=True)
    how = {"steps": asked.steps, "batch": BATCH, "rows": asked.rows, "rate": asked.rate, "layers": LAYERS, "k": asked.k}
    write_whole(Path(asked.out), json.dumps({"how": how, "runs": found}, indent=1) + "\n")
    Console(width=120).print(show(found))


def show(found: list[dict[str, Any]]) -> Table:
    table = Table(title="After the same steps", title_justify="left")
    for head in ("teacher", "bytes a token", "scored tokens/s", "acceptance", "to states", "tokens a call (T = 1)"):
        table.add_column(head, justify="left" if head == "teacher" else "right")
    base = {one["seed"]: one["acceptance"] for one in found if one["teacher"] == "states"}
    for name in dict.fromkeys(one["teacher"] for one in found):
        mine = [one for one in found if one["teacher"] == name]
        apart, half = interval([one["acceptance"] - base[one["seed"]] for one in mine])
        table.add_row(
            name, f"{mine[0]['bytes_a_token']:.0f}", f"{statistics.median(one['tokens_per_second'] for one in mine):.0f}",
            f"{statistics.fmean(one['acceptance'] for one in mine):.4f}", f"{apart:+.4f} ±{half:.4f}",
            f"{statistics.fmean(one['block_length'] for one in mine):.3f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
