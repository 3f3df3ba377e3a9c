"""Engines of several processes over gloo, launched as the configs that ship say, but as forks of one process that has imported everything: a
launch costs no import.

Run as a script it is that process. FSDP2 shards on a CPU by a patch of accelerate that only this file makes.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ON_A_CPU: dict[str, dict[str, str]] = {
    "ddp": {"ACCELERATE_USE_CPU": "true"}, "fsdp2": {}, "zero2": {"DS_ACCELERATOR": "cpu"}, "zero3": {"DS_ACCELERATOR": "cpu"},
}  # fmt: skip
# What other launchers say, and must not matter: a second division, a cast of all weights, targets that are not whole.
HOSTILE = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_CLIPPING": "0.01",
}
HOSTILE |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}
SEVERAL = [one for one in ON_A_CPU if not one.startswith("zero") or importlib.util.find_spec("deepspeed")]


class Ended(NamedTuple):
    """How the processes ended, what each printed, and what the first handed back."""

    codes: list[int]
    stdout: list[str]
    stderr: list[str]
    told: Any


class Ranks:
    """`run` a job (a function of this file, by name) on an engine, with its words, in a folder."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, engine: str, job: str, folder: Path, *words: Any, processes: int = 2) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        world = 1 if engine == "single" else processes
        asked = {"engine": engine, "job": job, "folder": str(folder), "words": [*map(str, words)], "world": world}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        said = [[(folder / f".{name}{rank}").read_text() for rank in range(world)] for name in ("stdout", "stderr")]
        told = folder / ".told"
        return Ended(codes, *said, json.loads(told.read_text()) if told.is_file() else None)


@contextmanager
def ranks() -> Iterator[Ranks]:
    from runs import environment

    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            yield Ranks(process)
        finally:
            process.kill()


def train(*words: str) -> None:
    """`draftsmith train` with these words."""
    from draftsmith.cli import main

    if code := main(["train", *words]):
        raise SystemExit(code)


def ended_at(step: str, *words: str) -> None:
    """The same, where the last process is asked to end after a step."""
    from draftsmith.train.watch import Watch

    inner = Watch.__call__

    def call(self: Watch, record: Any) -> bool:
        if record.step == int(step) and self.accelerator.process_index + 1 == self.accelerator.num_processes:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, record)

    Watch.__call__ = call  # type: ignore[method-assign]
    train(*words)


def target(recipe: str) -> list[list[float]]:
    """What each process has of the weights of a recipe's target, which it has loaded as a run does."""
    from accelerate.utils import gather_object

    from draftsmith.recipes import load_recipe
    from draftsmith.specdec import load
    from draftsmith.train.launch import launched

    with launched("no") as accelerator:
        model = load(load_recipe(recipe).target.model, device=accelerator.device).model
        return gather_object([[float(one.detach().double().sum()) for one in model.parameters()]])


def killed_in_a_forward(which: str, *words: str) -> None:
    """`train`, where the last process is killed before its forward number `which` of the target."""
    from draftsmith.distill.teacher import LiveTeacher

    inner, calls = LiveTeacher.hidden, []

    def hidden(self: LiveTeacher, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == int(which) and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, batch)

    LiveTeacher.hidden = hidden  # type: ignore[method-assign]
    train(*words)


def numbers(case: str) -> dict[str, Any]:
    """The steps of a case of `steps`."""
    from steps import taught

    return taught(case)


def parts() -> list[Any]:
    """Of each process: numbers of a target's blocks and of the rest of it that it holds once the target is in parts, the most that it held
    while it loaded and while it read, its generation settings, what is noted down of forwards, and what is left when it was let go of; and for some families whether the
    parts say what the whole says."""
    import torch
    from accelerate.utils import gather_object

    from draftsmith.distill import LiveTeacher
    from draftsmith.specdec.models import blocks
    from draftsmith.train import sharded
    from draftsmith.train.launch import launched
    from tiny import tiny

    ids, same, counts, reading = torch.tensor([[3, 7, 11, 5, 2]]), {}, [], []
    shard, inner = sharded.fully_shard, sharded._in_parts

    def local(module: Any) -> int:
        every = [one.to_local() if hasattr(one, "to_local") else one for one in module.parameters()]
        return sum(one.numel() for one in every if not one.is_meta)

    with launched("no") as accelerator, torch.no_grad():
        for name in ("llama", "gemma2", "qwen3_moe", "gpt2", "llama"):  # buffers in the body, experts, another name for the blocks
            whole = tiny(name).to(torch.bfloat16 if name in same else torch.float32)
            whole.generation_config.eos_token_id = [2, 9]
            wanted, made = whole(input_ids=ids).logits, []
            sharded.fully_shard = lambda module, made=made, **how: counts.append(local(made[0])) or shard(module, **how)
            sharded._in_parts = lambda model, *how, made=made: made.append(model) or inner(model, *how)
            there = sharded.spread(whole if accelerator.is_main_process else None, accelerator)
            for block in blocks(there)[1]:
                block.register_forward_pre_hook(lambda *_, there=there: reading.append(local(there)))
            same[f"{name} again" if name in same else name] = all(
                torch.equal(there(input_ids=ids).logits, wanted) for _ in range(2)
            )
            if len(same) == 1:
                stack = local(blocks(there)[1])
                noted = len(there.model._get_fsdp_state()._comm_ctx.post_forward_order)
                LiveTeacher(there).let_go()
                groups = [block._get_fsdp_state()._fsdp_param_group.fsdp_params for block in blocks(there)[1]]
                kept = [
                    local(blocks(there)[1]),
                    sum(one._sharded_param_data.untyped_storage().nbytes() for some in groups for one in some),
                ]
                held = [stack, local(there), max(counts), max(reading), there.generation_config.eos_token_id, noted, kept]
        return gather_object([[held, same]])


JOBS = {one.__name__: one for one in (train, ended_at, target, numbers, parts, killed_in_a_forward)}


def _serve() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import draftsmith.train.run  # noqa: F401
    from launches import environment_of

    for line in sys.stdin:
        asked = json.loads(line)
        if asked["engine"].startswith("zero"):
            os.environ["DS_ACCELERATOR"] = "cpu"
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # with torch's compiler, which every child would import
        gc.collect()
        gc.freeze()  # the children collect, and would walk through all that was imported
        asked["launch"] = (
            {} if asked["engine"] == "single" else environment_of(asked["engine"], "--num_processes", str(asked["world"]))
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [_started(asked, rank, port) for rank in range(asked["world"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _started(asked: dict[str, Any], rank: int, port: int) -> int:
    if child := os.fork():
        return child
    os.chdir(asked["folder"])
    for number, name in ((1, f".stdout{rank}"), (2, f".stderr{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.dump_traceback_later(float(os.environ.get("RANKS_LIMIT", "200")), exit=True, file=2)  # one that hangs says where
    world = asked["world"]
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | asked["launch"] | ON_A_CPU[asked["engine"]] | HOSTILE
    if asked["engine"] == "fsdp2":
        _shards_on_a_cpu()
    if asked["engine"] == "zero3":
        _parts_of_everything()
    code = 1
    try:
        told = JOBS[asked["job"]](*asked["words"])
        if rank == 0 and told is not None:
            Path(".told").write_text(json.dumps(told))
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _shards_on_a_cpu() -> None:
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from draftsmith.train import launch

    PartialState._prepare_backend = lambda self, cpu, sm, backend=None: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))  # type: ignore[method-assign]
    launch._no_sharding_on_a_cpu = lambda: None


def _parts_of_everything() -> None:
    """ZeRO-3 leaves weights of less than 100,000 numbers whole, which are all that a tiny model has."""
    from accelerate.utils import DeepSpeedPlugin

    inner = DeepSpeedPlugin.__post_init__

    def made(self: DeepSpeedPlugin) -> None:
        inner(self)
        self.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    DeepSpeedPlugin.__post_init__ = made


if __name__ == "__main__":
    _serve()
