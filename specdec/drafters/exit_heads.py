"""What an exit has of its own between layer E of a frozen target and the target's output head: modules beside it, never a change of it.

The state after layer E goes in, what the output head reads comes out. An `AdapterExit` can be called on [B, T, H] at each step, without
any state; `own_cache` kinds attend and keep keys of their own, `own_trunk` kinds run layers 1..E otherwise than the target does.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.specdec.models import blocks, final_norm, pick

PEFT = "default"  # the name of the only adapter


@dataclass(frozen=True)
class ExitSettings:
    """An exit after `layer` (1..L): the kind of its `head`, the `rank` of its map (None: full), and for kind lora {rank, alpha, targets}."""

    layer: int
    head: str = "adapter"
    rank: int | None = 64
    lora: Mapping[str, Any] | None = None


class AdapterExit(nn.Module):
    """A norm and a square map: the identity and `rank` more, or a full matrix. At first it is the target's own norm and no map.

    It computes in its own dtype (float32 while it is trained) and answers in that of the state.
    """

    own_cache = False
    own_trunk = False

    def __init__(self, norm: nn.Module, width: int, rank: int | None) -> None:
        super().__init__()
        self.norm = _copied(norm)
        if rank is None:
            self.map = nn.Linear(width, width, bias=False)
            nn.init.eye_(self.map.weight)
        else:
            self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
            nn.init.zeros_(self.up.weight)

    @property
    def out(self) -> AdapterExit:
        """What stands before the output head; the part that the other kinds share."""
        return self

    @property
    def rank(self) -> int | None:
        return self.down.weight.shape[0] if hasattr(self, "down") else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] after layer E -> [.., H] for the output head."""
        first: Any = self.map if self.rank is None else self.down
        normed = self.norm(hidden.to(first.weight.dtype))
        mapped = self.map(normed) if self.rank is None else normed + self.up(self.down(normed))
        return mapped.to(hidden.dtype)

    def square(self) -> Tensor:
        """The map as a matrix [H, H]."""
        if self.rank is None:
            return self.map.weight
        up, down = self.up.weight, self.down.weight
        return torch.eye(len(up), dtype=up.dtype, device=up.device) + up @ down


class BlockExit(nn.Module):
    """One more transformer block of the target's class, then what an adapter has: Kangaroo's head (Liu et al. 2404.18911).

    The block starts as a copy of the target's next layer, in whose place it stands, so the exit starts as the one after that layer.
    """

    own_cache = True
    own_trunk = False

    def __init__(self, layer: nn.Module, out: AdapterExit, config: Any) -> None:
        super().__init__()
        self.block, self.out = _copied(layer, config), out

    def forward(self, hidden: Tensor, *asked: Any, **named: Any) -> Tensor:
        """[B, T, H] after layer E, and what the target hands to its next layer besides (mask, positions, cache)."""
        dtype = next(self.block.parameters()).dtype  # float32 while it is trained, also beside a target in half precision
        said = self.block(hidden.to(dtype), *asked, **named)
        return self.out(said[0] if isinstance(said, tuple) else said).to(hidden.dtype)


class LoraExit(nn.Module):
    """LoRA (2106.09685) on layers 1..E of the draft alone, then what an adapter has: `layers` share the target's weights, which stay
    as they are, so nothing need be switched off to verify. Its own state is the adapters'."""

    own_cache = True
    own_trunk = True
    layers: nn.ModuleList

    def __init__(self, layers: nn.ModuleList, out: AdapterExit, config: Any, rank: int, alpha: int, targets: Any) -> None:
        super().__init__()
        self.out = out
        shared = _with_lora(_copied(layers, config, share=True), rank, alpha, targets)
        object.__setattr__(self, "layers", shared)  # not among this module's parameters: they are the target's
        self.lora = nn.ModuleDict()
        for name, one in adapted(shared):
            self.lora[name.replace(".", "-")] = nn.ModuleDict({"a": one.lora_A[PEFT], "b": one.lora_B[PEFT]})
        _put(self.lora, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., H] after its own layer E -> [.., H]."""
        return self.out(hidden)


ExitHead = AdapterExit | BlockExit | LoraExit


def is_exit_head(head: Any) -> TypeGuard[ExitHead]:
    return isinstance(head, AdapterExit | BlockExit | LoraExit)


def check_exit(target: PreTrainedModel, asked: ExitSettings) -> None:
    """ValueError where `target` cannot have this exit."""
    kind = pick(HEADS, asked.head, "the head of an exit")
    most, width = len(blocks(target)[1]) - (kind is _block), _width(target)
    if not 1 <= asked.layer <= most:
        why = "; its block stands in the place of the layer behind it" if kind is _block else ""
        raise ValueError(
            f"an exit with head {asked.head} after layer {asked.layer} asked; {type(target).__name__} has layers 1..{most} for it{why}"
        )
    if asked.rank is not None and not 1 <= asked.rank < width:
        raise ValueError(
            f"an exit of rank {asked.rank} asked, and the target's states have {width} numbers: take 1..{width - 1}, or full"
        )
    if (asked.lora is not None) != (kind is _lora):
        raise ValueError(f"head lora needs lora settings, and no other takes them; found head {asked.head} with lora {asked.lora}")


def make_head(target: PreTrainedModel, asked: ExitSettings) -> ExitHead:
    """An untrained head, in float32 beside the target; the same for the same settings, and no random state is touched."""
    check_exit(target, asked)
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(asked.layer)
        return _put(HEADS[asked.head](target, asked), device=target.device).train()


def adapted(layers: nn.Module) -> list[tuple[str, Any]]:
    """The layers with adapters, by name."""
    return [(name, one) for name, one in layers.named_modules() if hasattr(one, "lora_A")]


def _adapter(target: PreTrainedModel, asked: ExitSettings) -> AdapterExit:
    return AdapterExit(final_norm(target)[1], _width(target), asked.rank)


def _block(target: PreTrainedModel, asked: ExitSettings) -> BlockExit:
    return BlockExit(blocks(target)[1][asked.layer], _adapter(target, asked), target.config)


def _lora(target: PreTrainedModel, asked: ExitSettings) -> LoraExit:
    return LoraExit(blocks(target)[1][: asked.layer], _adapter(target, asked), target.config, **(asked.lora or {}))


HEADS: dict[str, Callable[[PreTrainedModel, ExitSettings], ExitHead]] = {"adapter": _adapter, "block": _block, "lora": _lora}


def _width(target: PreTrainedModel) -> int:
    head: Any = target.get_output_embeddings()
    return int(head.weight.shape[1])


def _copied(module: Any, config: Any = None, share: bool = False) -> Any:
    """A copy whose weights are its own, trainable and in float32, or (`share`) the very same. The config is never copied:
    what the target attends with, the copy does too."""
    held: dict[int, Any] = {} if config is None else {id(one): one for one in (config, config.get_text_config())}
    if share:
        held |= {id(one): one for one in itertools.chain(module.parameters(), module.buffers())}
        return copy.deepcopy(module, held)
    return _put(copy.deepcopy(module, held), dtype=torch.float32).requires_grad_(True)


def _put(module: Any, **where: Any) -> Any:
    """`Module.to`, in place: that one swaps tensors, which those of shapes alone (`distill.exit_memory`) do not let it."""
    for one in itertools.chain(module.parameters(), module.buffers()):
        if one.is_floating_point() or "device" in where:
            one.data = one.data.to(**where)
    return module


def _with_lora(layers: nn.ModuleList, rank: int, alpha: int, targets: Any) -> nn.ModuleList:
    from peft import LoraConfig, inject_adapter_in_model  # heavy, and of use to this kind alone

    linear = {name.rpartition(".")[2]: one for name, one in layers.named_modules() if isinstance(one, nn.Linear | Conv1D)}
    names = sorted(linear) if targets == "all-linear" else list(targets)
    if wrong := [one for one in names if one not in linear]:
        raise ValueError(f"adapters on {', '.join(wrong)} asked; the linear layers of this target are {', '.join(sorted(linear))}")
    turned = any(isinstance(linear[one], Conv1D) for one in names)
    frozen = [(one, one.requires_grad) for one in layers.parameters()]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, fan_in_fan_out=turned), layers, PEFT)
    for one, learns in frozen:  # peft freezes what it finds, and these are the target's
        one.requires_grad_(learns)
    return layers
