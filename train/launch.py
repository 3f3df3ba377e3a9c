"""The accelerator for however this process was launched; a launch that would not synchronise its processes is refused."""

from __future__ import annotations

import importlib.util
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
    """An accelerator that sees as many processes as were launched, and as `processes` says where it is not 0, or RuntimeError.

    Under FSDP2 and DeepSpeed it knows no `precision`: `engines.prepared` sees to it.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    zero, fsdp = (os.environ.get(f"ACCELERATE_USE_{one}", "").lower() == "true" for one in ("DEEPSPEED", "FSDP"))
    settings: dict[str, Any] = {
        "mixed_precision": "no" if zero or fsdp else precision,
        "kwargs_handlers": [InitProcessGroupKwargs(timeout=PATIENCE)],
    }
    _check_parallel()
    if zero:
        _check_deepspeed()
    if fsdp:
        _check_fsdp()
    if not torch.accelerator.is_available() and "LOCAL_RANK" in os.environ:
        if zero:
            # cpu=True here would turn DeepSpeed off
            settings["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo", timeout=PATIENCE)]
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, which takes minutes and gcc
        elif fsdp:
            _no_sharding_on_a_cpu()
        else:
            settings["cpu"] = True
    accelerator = Accelerator(**settings)
    if zero:
        no_zero_init()
        _check_dtypes(accelerator.state.deepspeed_plugin.deepspeed_config)
    accelerator.gradient_accumulation_steps = 1  # whatever the launcher says: accelerate would divide by it, too
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


def no_zero_init() -> None:
    """While transformers knows of ZeRO-3 it partitions every model that it makes: a frozen target, or the copy that a draft is saved from."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _check_parallel() -> None:
    for name, what in (
        ("MEGATRON_LM", "Megatron-LM"),
        ("PARALLELISM_CONFIG", "a parallelism_config (tensor, context or pipeline parallelism)"),
    ):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            raise RuntimeError(
                f"{what} was launched; processes share rows here, and nothing else. Launch with one of recipes/accelerate/*.yaml"
            )


def _check_dtypes(config: dict[str, Any]) -> None:
    if cast := [one for one in ("bf16", "fp16") if config.get(one, {}).get("enabled") not in (None, False, "auto")]:
        raise RuntimeError(
            f"the DeepSpeed config turns {cast[0]} on, which would cast the weights that are trained. Leave it out, and set train.precision=bf16"
        )


def _check_deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise RuntimeError(
            "DeepSpeed was launched and is not installed: pip install 'draftsmith[deepspeed]', or launch with ddp.yaml or fsdp2.yaml"
        )
    if os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "0":
        raise RuntimeError(
            "DeepSpeed was launched with ZeRO stage 0, which shards nothing; launch with ddp.yaml, or ask for stage 1, 2 or 3"
        )


def _check_fsdp() -> None:
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise RuntimeError(f"FSDP {version} was launched; only FSDP2 is known here. Set fsdp_version: 2, as fsdp2.yaml does")
    if os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true":
        raise RuntimeError(
            "fsdp_activation_checkpointing was launched, which renames the weights that a checkpoint holds. Leave it out, and set "
            "train.gradient_checkpointing=blocks"
        )
    # With it transformers leaves what a checkpoint lacks to the first process and to FSDP, which never sees the target.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def _no_sharding_on_a_cpu() -> None:
    raise RuntimeError(
        "accelerate does not shard on a CPU: FSDP asked for here would silently train unsharded. Use --multi_gpu (DDP over gloo)"
    )
