"""Makes the forward of a few tokens cost about what one token costs, for plain decoding and for verification alike."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from draftsmith.specdec import kernels

FEW = 32  # rows (batch x tokens) up to which the kernels win; BLAS is better at a prefill
PLAIN = 1e-6  # a norm is replaced where it agrees with weight * x / rms(x) within this, relative to its largest output


@dataclass(frozen=True)
class Report:
    """What `prepare_for_decoding` did: modules replaced, bytes added, and why not more."""

    linears: int = 0
    norms: int = 0
    extra_bytes: int = 0  # the kernels read the model's own weights
    why_not: str = ""


def prepare_for_decoding(model: PreTrainedModel, compiler: bool = True) -> PreTrainedModel:
    """Let the linears and RMSNorms of an fp32 model on the CPU serve few rows by kernels made for few rows; the same model.

    In place, idempotent, undone by `restore(model)` (do so before `torch.save` of a whole model; save_pretrained needs it not); `prepared(model)` does both. `report(model)` says what was done.
    Leave it off by not calling it; prepare target and draft alike, and the baseline is the prepared target's own.
    SmolLM2-135M, one thread of an AVX2 machine: docs/speed.md. No memory: weights stay where they are and are read at every
    call, so training, loading and merging between calls are seen. It costs a second, once a process, to build the kernels with the
    C compiler ($CC, cc, gcc or clang). Without one (or with `compiler=False`) 2..5 rows go through MKL the other way about,
    which is worth less but something.

    Every case that the kernels do not serve goes to the module's own forward: more rows than 32, gradients, autocast,
    torch.compile, another dtype or device, a weight that is not a plain contiguous tensor. On CUDA and in bf16 nothing is
    changed and the report says so: a static cache and CUDA graphs would be the gain there, and are not offered yet.
    """
    if (found := report(model)) is not None and not found.why_not and any(map(_is_prepared, model.modules())):
        return model
    restore(model)  # what was prepared without a compiler may have one now
    done = Report()
    first = next(model.parameters(), torch.empty(0, device="meta"))
    if first.device.type != "cpu" or first.dtype != torch.float32:
        done = replace(done, why_not=f"fp32 on the CPU is what can be prepared; this model is {first.dtype} on {first.device}")
    else:
        built = kernels.kernels() if compiler else kernels.Kernels(None, "told to do without a compiler")
        for module in list(model.modules()):
            if "forward" in vars(module):  # hooked or wrapped by someone else, who holds the old forward
                continue
            if type(module) is nn.Linear:
                cast(Any, module).__class__ = FewRowsLinear if built.library else TurnedLinear
                done = replace(done, linears=done.linears + 1)
            elif built.library and _plain_norm(module):
                module.__class__ = _norm_class(cast(Hashable, type(module)))
                done = replace(done, norms=done.norms + 1)
        done = replace(done, why_not=built.why_not)
    vars(model)["_decoding_report"] = done
    return model


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `prepare_for_decoding`: every module computes as it did before, bit for bit."""
    for module in model.modules():
        _restore(module)
    vars(model).pop("_decoding_report", None)
    return model


def _restore(module: nn.Module) -> None:
    if isinstance(module, FewRowsLinear | TurnedLinear):
        cast(Any, module).__class__ = nn.Linear
    elif isinstance(module, FewRowsNorm):
        module.__class__ = type(module).__mro__[2]  # [made here, FewRowsNorm, the model's own class, ...]


def _is_prepared(module: nn.Module) -> bool:
    return isinstance(module, FewRowsLinear | TurnedLinear | FewRowsNorm)


@contextmanager
def prepared(model: PreTrainedModel, compiler: bool = True) -> Iterator[PreTrainedModel]:
    """Prepared inside the `with`; a model that was prepared before stays so."""
    before = {id(module) for module in model.modules() if _is_prepared(module)}
    reported = report(model)
    try:
        yield prepare_for_decoding(model, compiler)
    finally:
        for module in model.modules():
            if id(module) not in before:
                _restore(module)
        if reported is None:
            vars(model).pop("_decoding_report", None)


def report(model: PreTrainedModel) -> Report | None:
    """What was done to this model, or None where nothing was asked."""
    return vars(model).get("_decoding_report")


# The class of a module is exchanged, not its forward: hooks, deepcopy, state_dict and views that share modules know nothing of it.
class FewRowsLinear(nn.Linear):
    """A linear whose products of few rows are one pass over its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        rows = x.numel() // max(weight.shape[1], 1) if len(weight) > 1 else 0
        library = kernels.kernels().library
        if library and 1 <= rows <= FEW and x.shape[-1] == weight.shape[1] and _ours(x, weight, bias):
            return kernels.linear(library, x, weight, bias)
        return F.linear(x, weight, bias)


class TurnedLinear(nn.Linear):
    """Without a compiler: MKL takes (W x')' for 2..5 rows at once, and x W' row by row or by the routine for hundreds."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        few = 2 <= x.numel() // max(weight.shape[1], 1) <= 5 and weight.shape[0] >= weight.shape[1]
        if few and x.shape[-1] == weight.shape[1] and _ours(x, weight, bias):
            y = torch.mm(weight, x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], -1).contiguous()
            return y if bias is None else y + bias
        return F.linear(x, weight, bias)


class FewRowsNorm(nn.Module):
    """Goes before the model's own RMSNorm class, which serves what the kernel does not."""

    weight: Tensor

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        library = None if more or named else kernels.kernels().library
        if library and 0 < x.numel() <= 64 * FEW * len(self.weight) and x.shape[-1] == len(self.weight) and _ours(x, self.weight):
            return kernels.rms_norm(library, x, self.weight, _eps(self))
        return super().forward(x, *more, **named)


@functools.cache
def _norm_class(own: Hashable) -> type[nn.Module]:
    return type(f"FewRows{cast(type, own).__name__}", (FewRowsNorm, cast(type, own)), {"__module__": __name__})


def _ours(*tensors: Tensor | None) -> bool:
    """Plain fp32 CPU tensors, weights contiguous, nothing recorded: what a pointer may be taken from."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    _x, *weights = tensors
    return all(
        one is None
        or (type(one) in (Tensor, nn.Parameter) and one.dtype == torch.float32 and one.device.type == "cpu" and not one.is_neg())
        for one in tensors
    ) and all(one is None or one.is_contiguous() for one in weights)


def _eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


@torch.no_grad()
def _plain_norm(module: nn.Module) -> bool:
    """Named an RMSNorm, with one weight, and computing as one on noise. Gemma's 1 + weight, for one, does not."""
    weight = getattr(module, "weight", None)
    if isinstance(module, FewRowsNorm) or not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return False
    if weight.dim() != 1 or len(list(module.parameters())) != 1 or list(module.children()) or not _ours(weight, weight):
        return False
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [30.0]])
    wanted = module(x)
    plain = weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _eps(module))
    return bool((plain - wanted).abs().max() <= PLAIN * wanted.abs().max().clamp_min(1e-30))
