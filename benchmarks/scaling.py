"""What a second process brings, and what checkpoints cost: a draft taught by a live target on one thread a process, over gloo.

    python benchmarks/scaling.py [--rounds 5] [--steps 100] [--out docs/measured/scaling.json]

Each round runs three arms, one after the other: one process; two that average their gradients (DDP); and two that know nothing of each other, which
is what this machine's cores, caches and memory would give at best. Each process has its own core, the same rows a step (the recipe's `batch_size`), and is
judged by the median of its steps. Ratios are within a round; what is printed is their median. Checkpoints come every 50 steps and are not part of the steps'
times: their share, and that of the log's lines, is of all the time of the process that runs alone. Half of a quiet hour on two cores; `--rounds 1 --steps 4
--width 32` is over in a minute and says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS = {"one": (1, 1), "two, averaging": (2, 1), "two, apart": (1, 2)}  # processes of a launch, launches at a time


def worker(asked: argparse.Namespace) -> None:
    """One process of an arm: teach for so many steps, and write down what they took."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftsmith.distill import CutDraft, DistillDraft, collate
    from draftsmith.recipes.schema import Train
    from draftsmith.train import checkpoint
    from draftsmith.train.launch import launched, leave
    from draftsmith.train.loop import Record, train
    from draftsmith.train.record import Log

    rank, place = int(os.environ.get("RANK", "0")), Path(asked.place)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(rank + asked.core) % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=asked.width, intermediate_size=3 * asked.width, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    objective = DistillDraft(CutDraft(target, [0, 5]), target, {"forward_kl": 1.0})
    chance = torch.Generator().manual_seed(rank)
    rows = [(torch.randint(3, 4096, (asked.length,), generator=chance).tolist(), 16) for _ in range(asked.rows)]
    speeds: list[float] = []
    spent = {"checkpoints": 0.0, "log": 0.0}
    with launched("no") as accelerator:
        optimizer = torch.optim.AdamW(objective.trainable.parameters(), lr=1e-3)
        objective.trainable, optimizer = accelerator.prepare(objective.trainable, optimizer)
        log = Log(place / "metrics.jsonl", accelerator.is_main_process)

        def after(record: Record) -> None:
            speeds.append(record.tokens_per_second)
            clock = time.perf_counter()
            log.write(record._asdict())
            spent["log"] += time.perf_counter() - clock
            if record.step % asked.save_every == 0:
                clock = time.perf_counter()
                figures = {"block_length": float(record.step)}
                checkpoint.save(place, record.step, objective, accelerator, figures, {}, 2, 0)
                spent["checkpoints"] += time.perf_counter() - clock

        started = time.perf_counter()
        settings = Train(warmup=0.1)
        train(
            objective, optimizer, lambda step: [collate(rows)], start=0, steps=asked.steps, settings=settings, accelerator=accelerator,
            after=after,
        )  # fmt: skip
        whole = time.perf_counter() - started
        if accelerator.is_main_process:
            found = {
                "tokens_per_second": statistics.median(speeds),
                "seconds": whole,
                "saves": asked.steps // asked.save_every,
            } | spent
            (place / "found.json").write_text(json.dumps(found))
    leave(0)


def launch(asked: argparse.Namespace, processes: int, core: int, place: Path) -> subprocess.Popen[str]:
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [__file__, "--worker", "--place", str(place), "--core", str(core)]
    for name in ("steps", "save_every", "rows", "length", "width"):
        command += [f"--{name.replace('_', '-')}", str(getattr(asked, name))]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL)


def measured(asked: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of an arm: tokens a second of all its processes together, and where the first one's time went."""
    processes, launches = ARMS[arm]
    with tempfile.TemporaryDirectory(dir=asked.disk) as folder:
        places = [Path(folder) / str(number) for number in range(launches)]
        running = []
        for core, place in enumerate(places):
            place.mkdir()
            running.append(launch(asked, processes, core, place))
        if codes := [one.returncode for one in running if one.wait()]:
            raise RuntimeError(f"{arm}: processes ended with {codes}")
        found = [json.loads((place / "found.json").read_text()) for place in places]
    return found[0] | {"arm": arm, "tokens_per_second": sum(one["tokens_per_second"] for one in found)}


def ratios(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over rounds: how many times one process's speed the others have, and the shares of its time."""
    one = [run for run in found if run["arm"] == "one"]
    said: dict[str, Any] = {
        f"{arm} / one": statistics.median(
            run["tokens_per_second"] / alone["tokens_per_second"]
            for run, alone in zip([run for run in found if run["arm"] == arm], one, strict=True)
        )
        for arm in ARMS
        if arm != "one"
    }
    said |= {f"share of {what}": statistics.median(run[what] / run["seconds"] for run in one) for what in ("checkpoints", "log")}
    saves = [run["checkpoints"] / run["saves"] for run in one if run["saves"]]
    return said | {"seconds a checkpoint": statistics.median(saves) if saves else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in {"rounds": 5, "steps": 100, "save_every": 50, "rows": 8, "length": 128, "width": 256, "core": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", help="a json file of every run, replaced")
    parser.add_argument("--disk", help="a folder on the disk that checkpoints are to be tried on; the system's temporary one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked)
    found = []
    for number in range(asked.rounds):
        for arm in ARMS:
            found.append({"round": number} | measured(asked, arm))
            print(found[-1], flush=True)
    said = ratios(found)
    how = {name: getattr(asked, name) for name in ("rounds", "steps", "save_every", "rows", "length", "width")} | {
        "cores": os.cpu_count()
    }
    if asked.out:
        Path(asked.out).write_text(json.dumps({"how": how, "ratios": said, "runs": found}, indent=1) + "\n")
    for name, value in said.items():
        print(f"{name}: {value if value is None else round(value, 4)}")


if __name__ == "__main__":
    main()
