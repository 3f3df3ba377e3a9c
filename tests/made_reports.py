"""Reports of schema 2, made in code: measurements drawn from a seed, and the figures that follow from them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from draftsmith.eval import metrics, report
from draftsmith.eval.bench import Measurement

KINDS = ("chat", "code")
# name: (drafter, k, chance that a draft is accepted, milliseconds of a drafted token, of a verifying call)
CANDIDATES: dict[str, tuple[str, int | str, float, float, float]] = {
    "ngram, k=2": ("ngram", 2, 0.35, 0.1, 31), "ngram, k=4": ("ngram", 4, 0.35, 0.1, 33), "ngram, k=6": ("ngram", 6, 0.35, 0.1, 36),
    "ngram, adaptive": ("ngram", "adaptive", 0.5, 0.1, 29), "trained, k=2": ("runs/x/draft", 2, 0.6, 3.0, 31), "trained, k=4": ("runs/x/draft", 4, 0.6, 3.0, 33),
}  # fmt: skip
PLAIN_MS = 27.0


def an_answer(rounds: Iterable[tuple[int, int]], **more: Any) -> Measurement:
    """One answer whose target calls (drafted, accepted) were these; what is not said is the same for all."""
    drafted, accepted = zip(*rounds, strict=True)
    new = sum(accepted) + len(accepted)
    fields: dict[str, Any] = {
        "drafter": "d", "k": 3, "temperature": 0.0, "batch": 1, "category": "a", "prompt": "x", "new_tokens": new, "seconds": 1.0,
        "baseline_tokens": new, "baseline_seconds": 1.0, "accepted_lengths": accepted, "drafted_lengths": drafted, "equal": 1, "compared": 1,
        "gaps": (), "draft_ms": 2.0, "target_ms": 10.0, "baseline_ms": 8.0,
    }  # fmt: skip
    return Measurement(**fields | more)


def measured(
    name: str, prompts: int = 6, tokens: int = 32, seed: int = 0, temperature: float = 0.0, faster: float = 1.0
) -> list[Measurement]:
    """One answer a prompt and kind; `faster` divides what it took."""
    _, k, chance, draft_ms, call_ms = CANDIDATES[name]
    out = []
    for kind in KINDS:
        for number in range(prompts):
            draw = random.Random(f"{name} {kind} {number} {seed}")
            drafted, accepted, written = [0], [0], 1
            while written < tokens:
                n = min(4 if k == "adaptive" else int(k), tokens - written - 1)
                got = next((place for place in range(n) if draw.random() > chance), n)
                drafted.append(n)
                accepted.append(got)
                written += got + 1
            clock = random.Random(f"clock {kind} {number}").uniform(0.97, 1.03)
            seconds = clock * (call_ms * (len(drafted) - 1) + draft_ms * sum(drafted) + 50) / 1000 / faster
            out.append(an_answer(
                zip(drafted, accepted, strict=True), drafter=name, k=k, temperature=temperature, category=kind, prompt=f"{kind}-{number}",
                seconds=seconds, baseline_tokens=tokens, baseline_seconds=clock * (PLAIN_MS * (tokens - 1) + 50) / 1000, draft_ms=draft_ms,
                target_ms=call_ms, baseline_ms=PLAIN_MS,
            ))  # fmt: skip
    return out


def figures(some: Sequence[Measurement]) -> dict[str, Any]:
    counts = [0] * (1 + max(max(m.accepted_lengths) for m in some))
    for m in some:
        for drafted, accepted in zip(m.drafted_lengths, m.accepted_lengths, strict=True):
            counts[accepted] += drafted > 0
    return metrics.summary(some, 200) | {"histogram": counts, "mbsu": 1.2, "first_token_ms": 55.0, "baseline_first_token_ms": 50.0}


def made_part(names: Sequence[str] = tuple(CANDIDATES), **changes: Any) -> tuple[dict[str, Any], list[Measurement]]:
    every = {name: measured(name, **changes) for name in names}
    candidates = {}
    for name, some in every.items():
        drafter, k, chance, draft_ms, call_ms = CANDIDATES[name]
        whole = figures(some)
        said = {
            "speed_up": whole["speed_up"]["value"] * 1.03,
            "forecast": whole["speed_up"]["value"] * 0.96,
            "c": draft_ms / PLAIN_MS,
            "r": call_ms / PLAIN_MS,
            "o": 0.01,
            "drafted": k,
            "break_even_alpha": 0.4,
        }
        candidates[name] = {
            "drafter": drafter, "k": k, "all": whole, "kinds": {kind: figures([m for m in some if m.category == kind]) for kind in KINDS},
            "predicted": None if k == "adaptive" else said,
            "teacher_forced": {"alpha": chance, "low": chance - 0.02, "high": chance + 0.02, "block_length": 1.9} if drafter != "ngram" else None,
        }  # fmt: skip
    answers = len(next(iter(every.values())))
    part = {
        "setting": {"prompts": "prompts.jsonl", "temperature": changes.get("temperature", 0.0), "batch": 1}, "answers": answers, "prompts": answers, "prompts_in_file": answers,
        "kinds": list(KINDS), "candidates": candidates, "noise": {"value": 1.001, "low": 0.99, "high": 1.012},
    }  # fmt: skip
    return part, [m for some in every.values() for m in some]


def made_report(name: str = "small", parts: int = 1, **changes: Any) -> dict[str, Any]:
    """A whole report; its parts differ in temperature."""
    both = [made_part(**{**changes, **({"temperature": float(place)} if parts > 1 else {})}) for place in range(parts)]
    pieces = [["The heron ", "target"], ["stands", "draft"], [" still.", "draft"], [" Then it ", "target"], ["strikes.", "draft"]]
    return {
        "schema": 2, "name": name,
        "how": {
            "target": "a/target", "target_revision": "sha256:1", "dtype": "fp32", "device": "a processor", "threads": 1, "max_new_tokens": 32,
            "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0}, "seed": 0, "prepared": "", "versions": {"torch": "2", "transformers": "5"},
        },
        "definitions": report.DEFINITIONS, "parts": [part for part, _ in both],
        "advice": ["Use trained, k=2: it is the fastest here.", "Do not speculate on chat: 1 is not excluded."], "guards": ["Only 6 prompts a kind."],
        "examples": [
            {"prompt": "What does a heron do?", "kind": "chat", "candidate": "trained, k=2", "pieces": pieces},
            {"prompt": "A long story. " * 40, "kind": "code", "candidate": "ngram, k=2", "pieces": pieces * 6},
        ],
        "measurements": [asdict(m) for _, some in both for m in some],
    }  # fmt: skip
