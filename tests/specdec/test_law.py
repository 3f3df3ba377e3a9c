"""The decoder's law by exact enumeration: every random choice is branched on, and the outputs' chances are summed."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import draftsmith.specdec.drafters.model  # noqa: F401
from branches import every_path, target_law
from draftsmith.specdec import (
    CombinedDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    Outcome,
    Proposal,
    Sampling,
    generate,
    to_probs,
)
from draftsmith.specdec.pace import Round
from tiny import ScriptedLM, sharp


class OneHot:
    """A drafter that is certain of what it says: the most likely token of another model, or a fixed one."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: ScriptedLM) -> None:
        self.model = model

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: object) -> None:
        self.tokens = [*ids[0].tolist(), int(last)]

    def propose(self, k: int, how: Sampling, generator: object) -> Proposal:
        self.said: list[int] = []
        for _ in range(k):
            self.said.append(int(self.model.law(tuple(self.tokens + self.said)).argmax()))
        return Proposal(torch.tensor([self.said], dtype=torch.long).reshape(1, -1), None, torch.tensor([k]))

    def observe(self, outcome: Outcome) -> None:
        self.tokens += [*self.said[: int(outcome.accepted)], int(outcome.next)]


class Trimmed(ScriptedLM):
    """Its head is over a few ids only, which it is told; it reads them all."""

    def __init__(self, vocabulary: int, salt: str, ids: list[int]) -> None:
        super().__init__(vocabulary, salt)
        self.says, self.head = torch.tensor(ids), torch.nn.Embedding(len(ids), 1)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def law(self, prefix: tuple[int, ...]) -> Tensor:
        return super().law(prefix)[self.says]


def trimmed(vocabulary: int, ids: list[int]) -> ModelDrafter:
    return ModelDrafter(Trimmed(vocabulary, "draft", ids), ids=torch.tensor(ids))  # type: ignore[arg-type]


CASES = {
    "model": (3, Sampling(1.0), 2, "token"),
    "model, k=3": (3, Sampling(1.0), 3, "token"),
    "model, block": (3, Sampling(1.0), 2, "block"),
    "model, block, k=3": (3, Sampling(0.7), 3, "block"),
    "model, top-k": (4, Sampling(0.8, top_k=2), 2, "token"),
    "model, top-p": (5, Sampling(1.3, top_p=0.6), 2, "token"),
    "model, k=1": (6, Sampling(0.5, top_k=3), 1, "token"),
    "trimmed": (5, Sampling(1.0), 2, "token"),
    "trimmed, block": (4, Sampling(0.8), 2, "block"),
    "trimmed, top-k, block": (5, Sampling(1.0, top_k=2), 3, "block"),
    "one-hot": (6, Sampling(1.0), 2, "token"),
    "one-hot, top-k": (6, Sampling(1.0, top_k=4), 3, "token"),
    "one-hot, top-p, block": (4, Sampling(0.9, top_p=0.7), 2, "block"),
    "plain": (5, Sampling(1.0), 0, "token"),
}


@pytest.mark.parametrize("case", CASES)
def test_three_tokens_behind_the_first_follow_the_targets_law(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, how, k, rule = CASES[case]
    target, other = ScriptedLM(vocabulary, "target"), ScriptedLM(vocabulary, "draft")
    make: dict[str, Callable[[], Any]] = {
        "o": lambda: OneHot(other), "m": lambda: ModelDrafter(other), "t": lambda: trimmed(vocabulary, [0, 2, 3]), "p": lambda: None,  # type: ignore[arg-type]
    }  # fmt: skip
    drafter = make[case[0]]()
    prompt = [1, 0]
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def run() -> list[int]:
        return generate(target, [prompt], drafter, k=k, max_new_tokens=4, how=how, verify=rule).tokens[0]  # type: ignore[arg-type]

    for text, chance in every_path(run, rule == "token", monkeypatch):
        found[text] += chance
    law = target_law(target, prompt, how, 4)
    assert abs(sum(found.values()) - sum(law.values())) < 1e-6
    for text, chance in law.items():
        assert abs(found[text] - chance) < 1e-6, (text, found[text], chance)


class Remembering:
    """A processor with a memory: every token costs more the oftener it was the last one seen, and each call a little more."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = defaultdict(int)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen[int(ids[0, -1])] += 1
        return scores - torch.tensor([0.9 * self.seen.get(token, 0) for token in range(scores.shape[-1])])


class Varying:
    """A pace that looks at what was accepted and at what the next proposal would rest on, as the adaptive one does."""

    sure = False

    def begin(self, prefill_seconds: float, tokens: int) -> None:
        self.accepted = 1

    def next(self, evidence: list[int]) -> int:
        return 2 if evidence[0] > 0 else self.accepted + 1

    def choose(self, ways: list[list[int]]) -> tuple[int, int]:
        way = self.accepted % len(ways)
        return (self.next(ways[way]) if ways[way][0] >= 0 else 0), way

    def observe(self, round: Round) -> None:
        self.accepted = round.accepted[0]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["combined", "combined, trimmed", "pace", "processor"])
def test_lookups_among_models_a_pace_and_a_processor_with_a_memory_keep_the_law(
    kind: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, other, how, prompt = ScriptedLM(3, "target"), ScriptedLM(3, "draft"), Sampling(0.9), [1, 0, 1, 2]
    model = trimmed(3, [0, 2]) if "trimmed" in kind else ModelDrafter(other)  # type: ignore[arg-type]
    drafter = model if kind == "processor" else CombinedDrafter(NgramDrafter(longest=3, least=0.01), model, min_match=1)
    settings: dict[str, Any] = {"processors": [Remembering()]} if kind == "processor" else {}
    found: dict[tuple[int, ...], float] = defaultdict(float)
    spoke: set[int] = set()

    def run() -> list[int]:
        pace = Varying() if kind == "pace" else None
        out = generate(target, [prompt], drafter, k=2, max_new_tokens=4, how=how, verify=rule, pace=pace, **settings)  # type: ignore[arg-type]
        if isinstance(drafter, CombinedDrafter):
            spoke.update(drafter.matches)
        return out.tokens[0]

    for text, chance in every_path(run, rule == "token", monkeypatch):
        found[text] += chance
    for text in itertools.product(range(3), repeat=4):
        if text[0] != next(iter(found))[0]:
            continue
        wanted, memory = 1.0, Remembering()
        for i, token in enumerate(text):
            logits = target.law((*prompt, *text[:i]))
            if kind == "processor":
                logits = memory(torch.tensor([[*prompt, *text[:i]]]), logits[None])[0]
            wanted *= float(to_probs(logits, how)[token])
        assert abs(found[text] - wanted) < 1e-6, (text, found[text], wanted)
    assert kind == "processor" or (0 in spoke and max(spoke) > 0), "both must have spoken"


@pytest.mark.parametrize("kind", ["exit", "exit, block", "lookup and exit"])
def test_an_exit_that_shares_the_targets_cache_keeps_the_law(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real model, two likeliest ids at each place: what the exit read ahead is part of every law that follows."""
    config = LlamaConfig(
        vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
    )
    target, how, prompt, rule = sharp(config), Sampling(2.0, top_k=2), [1, 0, 1, 2], "block" if "block" in kind else "token"
    exit_ = EarlyExitDrafter(target, 1)
    drafter = exit_ if "lookup" not in kind else CombinedDrafter(NgramDrafter(longest=2, least=0.01), exit_, min_match=2)
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def run() -> list[int]:
        return generate(target, [prompt], drafter, k=2, max_new_tokens=4, how=how, verify=rule).tokens[0]

    for text, chance in every_path(run, rule == "token", monkeypatch):
        found[text] += chance
    assert drafter.notes() == [], "it was to share"
    for text in itertools.product(range(3), repeat=4):
        if text[0] != next(iter(found))[0]:
            continue
        with torch.no_grad():
            laws = to_probs(target(input_ids=torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1], how)
        wanted = float(laws[torch.arange(4), torch.tensor(text)].double().prod())
        assert abs(found[text] - wanted) < 1e-5, (text, found[text], wanted)
    assert max(found.values()) < 0.9 * sum(found.values()), "the law is to be a law"


def test_the_enumeration_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling the correction from p instead of max(p - q, 0) is the classic fault; the enumeration must see it."""
    verify = sys.modules["draftsmith.specdec.verify"]
    monkeypatch.setattr(verify, "_residual", lambda p, q, draft, n, accepted, scale: p[torch.arange(len(draft)), accepted])
    target, other = ScriptedLM(3, "target"), ScriptedLM(3, "draft")
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def run() -> list[int]:
        return generate(target, [[1]], ModelDrafter(other), k=1, max_new_tokens=3, how=Sampling(1.0)).tokens[0]  # type: ignore[arg-type]

    for text, chance in every_path(run, True, monkeypatch):
        found[text] += chance
    law = target_law(target, [1], Sampling(1.0), 3)
    assert max(abs(found[text] - chance) for text, chance in law.items()) > 0.01


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_real_noise_follows_the_law_too(rule: str) -> None:
    """The enumeration replaces the random numbers; this draws them: 4,000 texts of four tokens against the target's law."""
    from scipy import stats

    target, other, how, rows = ScriptedLM(3, "target", 0.8), ScriptedLM(3, "draft", 0.8), Sampling(1.0), 4000
    out = generate(
        target, [[1, 0]] * rows, ModelDrafter(other), k=2, max_new_tokens=4, how=how, verify=rule, seed=list(range(rows))
    )  # type: ignore[arg-type]
    law = target_law(target, [1, 0], how, 4, every=True)
    counts = defaultdict(int)
    for text in out.tokens:
        counts[tuple(text)] += 1
    whole = sum(law.values())  # 1 but for float32's rounding, which chisquare does not forgive
    assert stats.chisquare([counts[text] for text in law], [rows * chance / whole for chance in law.values()]).pvalue > 1e-3
