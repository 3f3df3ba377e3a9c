"""What differs between the engines that a run can be launched on: how each holds the draft, how it steps, and what it cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from draftsmith.recipes import Recipe, runs
from draftsmith.recipes.schema import CheckpointDraft, ExitsDraft, Train, WidthDraft
from draftsmith.train.launch import no_zero_init

SHARDED = ("fsdp2", "zero3")  # a process holds a part of each weight
ZERO = ("zero2", "zero3")
ENGINES = ("single", "ddp", "fsdp2", "zero2", "zero3")
LAUNCHED = {"fsdp2": "FSDP2", "zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3"}
NAMES = {"single": "one process", "ddp": "DDP"} | LAUNCHED


def _answered(recipe: Recipe) -> bool:
    """Whether the rows are there, or come from elsewhere than the target at hand."""
    there = recipe.data.format == "messages" or recipe.data.answer_files or recipe.server is not None
    return bool(there) or (recipe.folder / "answers.jsonl").is_file()


def _copies_blocks(recipe: Recipe) -> bool:
    return isinstance(recipe.draft, ExitsDraft) and any(one.head != "adapter" for one in recipe.draft.exits)


class Limit(NamedTuple):
    """`what` a recipe asks for (`asked`) that some engines cannot do, why, and what to do about it."""

    what: str
    engines: tuple[str, ...]
    asked: Callable[[Recipe], bool]
    why: str
    instead: str


WHOLE = "Launch with ddp.yaml or zero2.yaml"
LIMITS = (
    Limit(
        "target.shard without answers", ENGINES, lambda recipe: recipe.target.shard and not _answered(recipe),
        "each token of an answer would send all of the target's weights from process to process",
        "Have them first: name files of answers (data.answers) or a server (server), or run draftsmith prepare where the target fits",
    ),
    Limit(
        "target.shard with exits of head block or lora", ENGINES, lambda recipe: recipe.target.shard and _copies_blocks(recipe),
        "such heads are copies of the target's own blocks, of which each process holds a part", "Take head adapter, or a target that fits whole",
    ),
    Limit(
        "target.shard", ("single",), lambda recipe: recipe.target.shard, "there is nobody to share it with",
        "Launch several processes (docs/launch.md), or set target.shard=false",
    ),
    Limit(
        "draft.kind: width or checkpoint", SHARDED, lambda recipe: isinstance(recipe.draft, WidthDraft | CheckpointDraft),
        "the losses read such a draft's own head outside of its forward, where a process holds a part of it", f"{WHOLE}, or take draft.kind: layers",
    ),
    Limit(
        "draft.kind: exits", SHARDED, lambda recipe: isinstance(recipe.draft, ExitsDraft),
        "heads are small, the target that they belong to is not sharded with them, and LoRA heads share weights between modules", WHOLE,
    ),
    Limit(
        "train.on_policy", SHARDED, lambda recipe: recipe.train.on_policy is not None,
        "each process has a part of the draft's weights: it could write no rows", f"{WHOLE}, or leave train.on_policy out",
    ),
    Limit(
        "train.skip_bad_steps", ZERO, lambda recipe: recipe.train.skip_bad_steps > 0,
        "DeepSpeed knows the norm of a gradient only when it has stepped: a bad step would be in the weights",
        "Launch with ddp.yaml or fsdp2.yaml, or set train.skip_bad_steps=0",
    ),
    Limit(
        "target.dtype below fp32 without train.precision: bf16", ZERO,
        lambda recipe: recipe.target.dtype != "fp32" and recipe.train.precision == "no",
        "DeepSpeed takes weights in float32 here, and keeps them so", "Set train.precision=bf16",
    ),
)  # fmt: skip


def engine(accelerator: Accelerator) -> str:
    """One of `ENGINES`; ZeRO stage 1 is named zero2, from which it differs in memory alone."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return "zero3" if accelerator.state.deepspeed_plugin.zero_stage == 3 else "zero2"
    if kind == DistributedType.FSDP:
        return "fsdp2"
    return "ddp" if accelerator.num_processes > 1 else "single"


def check_engine(recipe: Recipe, accelerator: Accelerator) -> None:
    """ValueError where the recipe asks for what this launch's engine cannot do."""
    name = engine(accelerator)
    for one in LIMITS:
        if name in one.engines and one.asked(recipe):
            raise ValueError(f"{one.what} asked with {NAMES[name]}: {one.why}. {one.instead}")


def table() -> list[str]:
    """The limits as a table of Markdown, a line each."""
    lines = ["| a recipe's | " + " | ".join(ENGINES) + " | where refused, because |", "|" + "---|" * (len(ENGINES) + 2)]
    for one in LIMITS:
        marks = ["refused" if name in one.engines else "yes" for name in ENGINES]
        lines.append(f"| {one.what} | {' | '.join(marks)} | {one.why} |")
    return lines


def check_trainer(folder: Path, accelerator: Accelerator) -> None:
    """ValueError where the last checkpoint holds what this launch cannot read: sharded weights, or those of other processes."""
    done = runs.steps(folder)
    if not done:
        return
    before, now = runs.state(done[-1]).get("trainer", "whole"), trainer(accelerator)
    if before != now:
        raise ValueError(
            f"{folder} cannot go on from {done[-1].name}: its trainer's state is {before}, and this launch reads {now}. Launch it as before, "
            f"or begin another run from {done[-1] / 'draft'} (draft.kind: checkpoint, name=...)"
        )


def trainer(accelerator: Accelerator) -> str:
    """How a checkpoint holds the trainer's state. `whole` is one to go on from with any number of processes, and so is fsdp2, which torch
    shards anew; DeepSpeed reads the state of as many processes as wrote it."""
    name = engine(accelerator)
    if name in ZERO:
        return f"{name} of {accelerator.num_processes}"
    return name if name in SHARDED else "whole"


def prepared(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: Train, accumulate: int, accelerator: Accelerator
) -> tuple[Any, Any]:
    """What is trained and its optimizer, as the engine holds them; `accumulate` micro-batches a step.

    bfloat16 is autocast over float32 weights on every engine, and gradients are reduced in float32. What FSDP2 and DeepSpeed
    call bf16 reduces gradients in bfloat16, and would give other numbers.
    """
    name = engine(accelerator)
    if name in LAUNCHED and settings.precision == "bf16":
        module.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(module.forward)
    if name == "fsdp2":
        for one in [
            *module.parameters(),
            *module.buffers(),
        ]:  # it shards what each process has, and asks nobody whether it is the same
            torch.distributed.broadcast(one.data, 0)
    if name in ZERO:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config |= {"train_micro_batch_size_per_gpu": settings.batch_size, "gradient_accumulation_steps": accumulate}
        config["gradient_clipping"] = settings.clip
        accelerator.gradient_accumulation_steps = accumulate  # or it warns of a mismatch
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = (
            True  # float32 ones too: what a draft is saved from
        )
    module, optimizer = accelerator.prepare(module, optimizer)
    if name in ZERO:
        no_zero_init()
        accelerator.gradient_accumulation_steps = 1  # the loop divides, by tokens
    return module, optimizer


@contextmanager
def micro_batch(module: Any, last: bool, accelerator: Accelerator) -> Iterator[Callable[[Tensor], Any]]:
    """How to go backward through a micro-batch; processes exchange gradients in the last one of a step."""
    if engine(accelerator) in ZERO:
        module.set_gradient_accumulation_boundary(last)
        yield partial(module.backward, scale_wrt_gas=False)  # the loop has divided, by tokens
        return
    with contextlib.nullcontext() if last else accelerator.no_sync(module):
        yield accelerator.backward


def clipped(parameters: list[nn.Parameter], most: float, accelerator: Accelerator) -> float | None:
    """The norm of the gradient, which is then clipped to `most`; None of DeepSpeed, which does both in `stepped`."""
    if engine(accelerator) in ZERO:
        return None
    norm: Any = accelerator.clip_grad_norm_(parameters, most)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def stepped(module: Any, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> float | None:
    """Take the step; the gradient's norm before it was clipped where only DeepSpeed knew that."""
    if engine(accelerator) in ZERO:
        module.step()
        return float(module.get_global_grad_norm())
    optimizer.step()
    return None


def size(parameter: Any) -> int:
    """How many numbers a parameter has on all processes together; of ZeRO-3's no process has any between two forwards."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def gathered(module: Any, accelerator: Accelerator) -> dict[str, Tensor] | None:
    """The whole weights of a module whose processes hold parts of them, on all processes or on the first; None where each has all."""
    return accelerator.get_state_dict(module) if engine(accelerator) in SHARDED else None


def bare(module: Any, accelerator: Accelerator) -> nn.Module:
    """The module without its wrapper; with it where the wrapper is what has the weights."""
    return module if engine(accelerator) in SHARDED else accelerator.unwrap_model(module)


def shares(batches: list[Any], accelerator: Accelerator) -> Iterable[tuple[Any, bool]]:
    """This process's batches, and whether each counts: all processes run as many, for a forward of sharded weights, the draft's or the
    target's, is a talk between them; where none are, who has fewer would wait for the others anyway."""
    rank, world = accelerator.process_index, accelerator.num_processes
    mine = [(one, True) for one in batches[rank::world]]
    if batches:
        mine += [(batches[0], False)] * (-(-len(batches) // world) - len(mine))
    return mine
