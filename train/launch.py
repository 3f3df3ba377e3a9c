"""The accelerator for however this process was launched; a launch that would not synchronise its processes is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from draftsmith.recipes.progress import give_back

# The first process may answer prompts for hours while the others wait for it; NCCL would give up after 10 minutes, gloo after 30.
# That one is dead is not learned by waiting (company.py).
PATIENCE = timedelta(days=1)


@contextmanager
def launched(precision: str, processes: int = 0) -> Iterator[Accelerator]:
    """The accelerator while a block runs; behind it the processes part in order.

    A process that exits while its group stands destroys the group's threads as they run, which now and then aborts it.
    """
    accelerator = make_accelerator(precision, processes)
    try:
        yield accelerator
        accelerator.wait_for_everyone()
    finally:
        accelerator.end_training()


def leave(code: int) -> None:
    """End the process; one of several that were launched is not torn down.

    gloo's threads now and then abort a process on its way out ("terminate called without an active exception"), though its
    group is destroyed and its work is done and on disk; the launcher would call the whole run failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        give_back()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def make_accelerator(precision: str, processes: int = 0) -> Accelerator:
    """An accelerator that sees as many processes as were launched, and as `processes` says where it is not 0, or RuntimeError."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {"mixed_precision": precision, "kwargs_handlers": [InitProcessGroupKwargs(timeout=PATIENCE)]}
    if not torch.accelerator.is_available() and "LOCAL_RANK" in os.environ:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            settings["kwargs_handlers"] = [
                InitProcessGroupKwargs(backend="gloo", timeout=PATIENCE)
            ]  # cpu=True here would turn DeepSpeed off
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes minutes and gcc
        elif os.environ.get("ACCELERATE_USE_FSDP") == "true":
            raise RuntimeError(
                "accelerate does not shard on a CPU: FSDP asked for here would silently train unsharded. Use --multi_gpu (DDP over gloo)"
            )
        else:
            settings["cpu"] = True
    accelerator = Accelerator(**settings)
    if accelerator.num_processes != world or (world > 1 and accelerator.distributed_type == DistributedType.NO):
        raise RuntimeError(
            f"{world} processes were launched, accelerate sees {accelerator.num_processes} ({accelerator.distributed_type}): they would "
            "not average their gradients. Launch with accelerate launch --multi_gpu --num_processes N"
        )
    if processes not in (0, world):
        raise RuntimeError(
            f"train.processes={processes} asked, {world} found: accelerate launch --cpu and --num_processes alone start one whatever they "
            f"are told. Launch with accelerate launch --multi_gpu --num_processes {processes} (on a CPU with ACCELERATE_USE_CPU=true before "
            f"it), or set train.processes={world}"
        )
    return accelerator
