"""How long a call takes: bytes over bandwidth and operations over FLOP/s, the longer of the two and a part of the shorter, and what an
engine adds. Formulas and what they were fitted on: docs/plan.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from draftsmith.eval.plan.devices import Device, Dtype, Engine
from draftsmith.eval.plan.drafts import Draft
from draftsmith.eval.plan.sizes import Size

MOST = 16  # longest block that is looked at


@dataclass(frozen=True)
class Pair:
    """A target and its draft, the formats of their weights, and what they run on."""

    target: Size
    draft: Draft
    dtype: Dtype
    draft_dtype: Dtype
    device: Device
    engine: Engine


class Costs(NamedTuple):
    """Seconds. `verify[n]` is a call of the target on n + 1 tokens of each sequence; `verify[0]` is plain decoding's."""

    verify: list[float]
    step: float  # one drafted token of each sequence
    round: float  # what a round takes beside calls and steps

    @property
    def plain(self) -> float:
        return self.verify[0]

    @property
    def c(self) -> float:
        return self.step / self.plain

    @property
    def o(self) -> float:
        return self.round / self.plain

    def r(self, k: int) -> float:
        """A call on k + 1 tokens over one on a single token."""
        return self.verify[k] / self.plain


def moved(size: Size, dtype: Dtype, tokens: int, batch: int, context: int, expands: bool = False) -> float:
    """Bytes that one call on `tokens` new tokens of each of `batch` sequences reads: weights once, every cache once, or once a token."""
    caches = batch * (tokens if expands else 1)
    return dtype.bytes(size.outer, size.touched(tokens * batch)) + caches * size.cache(context) * dtype.cached


def work(size: Size, tokens: int, batch: int, context: int) -> float:
    """Floating-point operations of that call."""
    return tokens * batch * (2 * size.active + size.attention(context))


def seconds(size: Size, dtype: Dtype, tokens: int, batch: int, context: int, device: Device, engine: Engine) -> float:
    """What that call takes, launches included, an engine's own work left out."""
    rate = device.bandwidth_gbs * 1e9 * device.efficiency.bandwidth
    reading = moved(size, dtype, tokens, batch, context, engine.expands) / rate
    computing = work(size, tokens, batch, context) / device.flops(dtype)
    longer, shorter = max(reading, computing), min(reading, computing)
    return max(longer + (1 - device.efficiency.overlap) * shorter, len(size.blocks) * engine.layer_ms / 1e3)


def costs(pair: Pair, batch: int, context: int, most: int = MOST) -> Costs:
    """What a round is made of, for `batch` sequences of `context` tokens."""
    device, engine = pair.device, pair.engine
    calls = [
        seconds(pair.target, pair.dtype, n, batch, context, device, engine) + (engine.call_ms + engine.token_ms * batch * n) / 1e3
        for n in range(1, most + 2)
    ]
    if pair.draft.share is not None:
        step = pair.draft.share * calls[0]
    elif pair.draft.size is None:
        step = 0.0
    else:
        step = seconds(pair.draft.size, pair.draft_dtype, 1, batch, context, device, engine) + engine.step_ms / 1e3
    return Costs(calls, step, engine.round_ms / 1e3)
