"""Bytes that are held: by tensors, as they come and go, and by this process, now and at its height."""

from __future__ import annotations

import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class Live(TorchDispatchMode):
    """Bytes of the tensors made inside it that live `now`, the `peak` of that (set it back as you like), and the elements of the
    `largest`. `known` tensors, made outside, count as nothing."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._alive: dict[int, int] = {}
        for one in known:
            self._alive[one.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._made, out)
        return out

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return  # a view, or changed in place
        size = storage.nbytes()
        self._alive[storage._cdata] = size
        weakref.finalize(storage, self._gone, storage._cdata)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size // tensor.element_size())

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def nbytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def resident() -> int:
    """What this process holds in memory now, in bytes (where a system does not tell: what it held at most so far)."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * resource.getpagesize() if told.exists() else measured(device="cpu")


def measured(before: int = 0, device: str | None = None) -> int:
    """The most that was held so far, in bytes: on a GPU by torch's tensors there, else by this process beyond what was there `before`."""
    if (device or ("cuda" if torch.cuda.is_available() else "cpu")) != "cpu":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak - before
