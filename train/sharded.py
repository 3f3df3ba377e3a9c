"""A frozen target of whose blocks each process holds a part: all of them read together, a block whole at a time, so each must read as often as
the others do. FSDP2 of torch does it, whatever engine has the draft."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from draftsmith.distill.held import nbytes
from draftsmith.specdec.models import Loaded, blocks, load_model, load_tokenizer, with_ends
from draftsmith.specdec.places import quiet, resolve


class Told(NamedTuple):
    """What the first process says of the model that it alone has read: enough to build it without its weights."""

    config: Any
    settings: Any  # its generation settings
    tensors: dict[str, tuple[torch.Size, torch.dtype]]


def load_sharded(name: str, dtype: str, accelerator: Accelerator) -> Loaded:
    """`specdec.models.load` on all processes together, the model's blocks in parts.

    The first process reads the weights on its CPU, the others none: so many copies would be more than a machine has. Each block is
    sent whole and cut there, so a device holds at most its parts and one block, beside what stays whole on each: embedding, norms and
    head, which losses and drafts use outside of the model's forward.
    """
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise RuntimeError(
            f"target.shard asked with torch {torch.__version__}, whose FSDP2 cannot leave embedding and head whole. Take a newer torch (2.13 was "
            "tried), or set target.shard=false"
        )
    with accelerator.main_process_first():  # it may have to be fetched, or dequantised
        tokenizer = with_ends(load_tokenizer(name), name)
        config = AutoConfig.from_pretrained(resolve(name))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"target.shard asked of {name}, whose weights are quantised: packed numbers are not cut into parts here. Name its "
            "unquantised checkpoint as target.model, or set target.shard=false"
        )
    return Loaded(spread(load_model(name, dtype) if accelerator.is_main_process else None, accelerator), tokenizer)


def spread(model: PreTrainedModel | None, accelerator: Accelerator) -> PreTrainedModel:
    """A model that the first process has and the others need not, in parts on all of them; frozen, in eval mode."""
    told = broadcast_object_list([_told(model) if accelerator.is_main_process and model is not None else None])[0]
    if model is None or not accelerator.is_main_process:
        model = _empty(told)
    if (found := {*_named(model)}) != {*told.tensors}:
        raise ValueError(
            f"target.shard: {told.config.name_or_path or type(model).__name__} built from its config has other tensors than its checkpoint "
            f"gives ({', '.join(sorted(found ^ {*told.tensors})[:3])}). Set target.shard=false"
        )
    _in_parts(model.requires_grad_(False).eval(), told.tensors, accelerator)
    return model


def _in_parts(model: PreTrainedModel, tensors: dict[str, tuple[torch.Size, torch.dtype]], accelerator: Accelerator) -> None:
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    body: Any = getattr(model, model.base_model_prefix)
    stack = blocks(model)[1]
    within = {id(one) for one in itertools.chain(stack.parameters(), stack.buffers())}
    send = {name: one for name, one in _named(model).items() if id(one) not in within}
    _sent(send, tensors, accelerator.device)
    whole = {one for one in model.parameters() if id(one) not in within}
    prefix = f"{model.base_model_prefix}.{blocks(model)[0]}"
    for number, block in enumerate(stack):
        named = {f"{prefix}.{number}.{name}": one for name, one in _named(block).items()}
        named = {name: one for name, one in named.items() if name in tensors}  # the others were sent with another block
        _sent(named, tensors, accelerator.device)
        single = {one for one in block.parameters() if not one.dim()}  # of which there are no parts
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=single)
    fully_shard(body, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    if hasattr(body, "reset_iter_state"):  # a newer torch
        # Each forward of each block is noted down for a backward that never comes.
        body.register_forward_hook(lambda *_: body.reset_iter_state())


def is_sharded(target: PreTrainedModel) -> bool:
    return isinstance(getattr(target, target.base_model_prefix, None), FSDPModule)


@contextmanager
def in_step(target: PreTrainedModel, accelerator: Accelerator) -> Iterator[None]:
    """A block in which processes ask a sharded target unequally often: who is through with it reads along until all are.

    Before each forward all processes say whether they are still at work. They may say nothing else to each other within the block.
    """
    if not is_sharded(target):
        yield
        return
    body: Any = getattr(target, target.base_model_prefix)

    def at_work(*_: Any) -> None:
        _any(True, accelerator)

    hook = body.register_forward_pre_hook(at_work)
    try:
        yield
    finally:
        hook.remove()
    nothing = torch.zeros(1, 1, dtype=torch.long, device=accelerator.device)
    with torch.no_grad():
        while _any(False, accelerator):
            body(input_ids=nothing, use_cache=False)


def asked_by_any(target: PreTrainedModel, accelerator: Accelerator) -> Callable[[bool], bool]:
    """Whether the target is to be asked, from whether this process needs it: a sharded one is asked by all, or by none."""
    return (lambda needed: _any(needed, accelerator)) if is_sharded(target) else bool


def held(target: PreTrainedModel) -> tuple[int, int]:
    """Bytes of the target's weights on this process, if they have not been let go of, and on all together."""
    here = [one.to_local() if hasattr(one, "to_local") else one for one in target.parameters()]
    return nbytes(one for one in here if not one.is_meta), nbytes(target.parameters())


def _any(one: bool, accelerator: Accelerator) -> bool:
    told: Any = accelerator.reduce(torch.tensor(float(one), device=accelerator.device), "sum")
    return bool(told > 0)


def _told(model: PreTrainedModel) -> Told:
    return Told(model.config, model.generation_config, {name: (one.shape, one.dtype) for name, one in _named(model).items()})


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers (rotary frequencies are in no state dict), each once however many modules share it."""
    return dict(itertools.chain(module.named_parameters(), module.named_buffers()))


def _empty(told: Told) -> PreTrainedModel:
    with quiet(), torch.device("meta"), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(told.config)
    model.tie_weights()  # it is part of the drawing
    model.generation_config = told.settings
    return model


def _sent(named: dict[str, Tensor], tensors: dict[str, tuple[torch.Size, torch.dtype]], device: torch.device) -> None:
    """Put the first process's numbers into the tensors on all, in place: modules may share them."""
    for name, one in named.items():
        shape, dtype = tensors[name]
        there = torch.empty(shape, dtype=dtype, device=device) if one.is_meta else one.data.to(device).contiguous()
        torch.distributed.broadcast(there, 0)
        # Another object than what was sent, which the sending may hold on to for a while.
        other = nn.Parameter(there, requires_grad=False) if isinstance(one, nn.Parameter) else there.detach()
        torch.utils.swap_tensors(one, other)
