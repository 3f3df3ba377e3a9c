"""What the decoder adds to the forwards that it makes, and what a forward of n tokens costs over one of one: the r(n) of speculation."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.specdec import ModelDrafter, NgramDrafter, generate
from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.models import chat_ids

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def overhead(real: Any, tokenizer: Any, k: int) -> dict[str, float]:
    """Wall clock of our loop over the sum of its forwards, each clocked from outside: the real target, and models of a millisecond."""
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    tiny, tinier = (
        AutoModelForCausalLM.from_config(LlamaConfig(**small, num_hidden_layers=layers), dtype=torch.float32).eval()
        for layers in (6, 1)
    )
    ids = chat_ids(tokenizer, [{"role": "user", "content": "Why is the sky blue? Answer in a few sentences."}])
    runs = {
        "SmolLM2-135M, plain": (real, None, ids, 32), "SmolLM2-135M, n-gram": (real, NgramDrafter(), ids, 32),
        "tiny, plain": (tiny, None, list(range(40)), 200), "tiny, n-gram": (tiny, NgramDrafter(), list(range(40)), 200),
        "tiny, draft": (tiny, ModelDrafter(tinier), list(range(40)), 200),
    }  # fmt: skip
    out = {}
    for name, (model, drafter, prompt, tokens) in runs.items():
        models = [model, *([drafter.model] if isinstance(drafter, ModelDrafter) else [])]
        each = []
        for _ in range(5):
            with _clocked(models) as inside:
                start = time.perf_counter()
                generate(model, [prompt], drafter, k=k, max_new_tokens=tokens)
                each.append((time.perf_counter() - start) / sum(inside))
        out[name] = statistics.median(each[1:])
    return out


def r(models: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """For each model the median milliseconds of a forward of n tokens behind the same prefix, and that over the one of one token."""
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in WIDTHS} for name in models}
    lms = {name: CachedLM(model, 1) for name, model in models.items()}
    ids = torch.tensor([prompt])
    for lm in lms.values():
        lm.extend(ids, torch.ones_like(ids, dtype=torch.bool), keep=1)
    for turn in range(13):
        for n in WIDTHS:
            for name, lm in lms.items():
                some = torch.full((1, n), 100)
                start = time.perf_counter()
                lm.extend(some, torch.ones_like(some, dtype=torch.bool))
                if turn > 1:
                    times[name][n].append(1000 * (time.perf_counter() - start))
                lm.forget(torch.tensor([n]))
    ms = {name: {n: statistics.median(each) for n, each in rows.items()} for name, rows in times.items()}
    return {name: {"ms": rows, "r": {n: rows[n] / rows[1] for n in WIDTHS}} for name, rows in ms.items()}


@contextmanager
def _clocked(models: list[Any]) -> Iterator[list[float]]:
    """The seconds of every forward of some models, taken by replacing each model's own forward."""
    inside: list[float] = []
    for model in models:
        forward = model.forward

        def timed(*args: Any, forward: Any = forward, **settings: Any) -> Any:
            start = time.perf_counter()
            out = forward(*args, **settings)
            inside.append(time.perf_counter() - start)
            return out

        timed.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        model.forward = timed
    try:
        yield inside
    finally:
        for model in models:
            del model.forward
