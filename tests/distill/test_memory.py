"""What a step is predicted to take is what it takes, tensor by tensor; and what a process took is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from counted import step_twice
from draftsmith.distill import CutDraft, DistillDraft, LiveTeacher, collate, memory
from draftsmith.distill.chunked import Asked
from draftsmith.distill.held import Live
from draftsmith.distill.making.lora import with_lora
from draftsmith.distill.memory import predict
from tiny import FAMILIES, tiny

CONFIG = LlamaConfig(
    vocab_size=3000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)
ASKED = Asked({"forward_kl": 1.0}, chunk=32)


def test_bytes_of_tensors_are_counted_while_they_live() -> None:
    known = torch.zeros(100)
    with Live(known) as live:
        one = torch.zeros(1000)
        two = one.view(10, 100) + known  # a view takes nothing, the sum does
        assert (live.now, live.largest) == (8000, 1000)
        one.add_(1)
        known.mul_(2)
        assert live.now == 8000
        del one
        assert live.now == 4000
        del two
        assert (live.now, live.peak) == (0, 8000)


def test_what_stays_is_counted_to_the_byte() -> None:
    found = predict(CONFIG, [0, 3], rows=2, length=16, scored=20, asked=ASKED)
    target = AutoModelForCausalLM.from_config(CONFIG)
    weights = sum(one.numel() for one in CutDraft(target, [0, 3]).parameters()) * 4
    assert found.target == sum(one.numel() for one in target.parameters()) * 4
    assert (found.draft, found.gradients, found.moments) == (weights, weights, 2 * weights)
    assert found.total > found.target + found.draft + found.gradients + found.moments
    assert found.total <= sum(found[:-1])
    half = predict(CONFIG, [0, 3], rows=2, length=16, scored=20, asked=ASKED, dtype=torch.bfloat16)
    assert (half.target, half.draft) == (found.target // 2, weights // 2)
    mixed = predict(CONFIG, [0, 3], rows=2, length=16, scored=20, asked=ASKED, dtype=torch.bfloat16, bf16=True)
    assert (mixed.target, mixed.draft, mixed.gradients) == (found.target // 2, weights, weights), "what is trained is in float32"


def test_of_a_target_in_parts_a_process_holds_its_part_and_two_blocks_while_it_reads() -> None:
    asked: Any = {"draft": [0, 3], "rows": 2, "length": 64, "scored": 20, "asked": ASKED}
    whole, parts, stored = (
        predict(CONFIG, **asked),
        predict(CONFIG, **asked, shards=4),
        predict(CONFIG, **asked, shards=4, listens=False),
    )
    block = sum(one.numel() for one in AutoModelForCausalLM.from_config(CONFIG).model.layers[0].parameters()) * 4
    assert whole.target - parts.target == whole.target - stored.target == 3 * block  # of four blocks a quarter each
    assert parts.teacher - whole.teacher == 2 * block
    assert parts[1:4] == whole[1:4]
    assert stored.teacher == 0
    assert whole.total - stored.total == 3 * block  # the losses are the height of it, not the target's forward
    long: Any = asked | {"rows": 1, "length": 2, "scored": 1}  # where it is the target's forward
    assert predict(CONFIG, **long).total - predict(CONFIG, **long, shards=4).total == 3 * block


def test_blocks_that_are_made_again_keep_only_what_goes_into_them() -> None:
    asked: Any = {"rows": 2, "length": 64, "scored": 20, "asked": ASKED}
    kept, again = predict(CONFIG, [0, 3], **asked), predict(CONFIG, [0, 3], **asked, recompute=True)
    assert again.activations < 0.6 * kept.activations
    assert again.total < kept.total
    assert again._replace(activations=0, total=0) == kept._replace(activations=0, total=0)


def test_each_part_grows_with_what_it_is_of() -> None:
    def of(rows: int = 2, length: int = 64, scored: int = 100, chunk: int = 32, **more: object) -> object:
        return predict(CONFIG, [0, 3], rows, length, scored, ASKED._replace(chunk=chunk), **more)  # type: ignore[arg-type]

    base, wide, long = of(), of(rows=4), of(length=128)
    assert wide.activations == pytest.approx(2 * base.activations, rel=0.1)  # type: ignore[attr-defined]
    assert long.activations >= 1.9 * base.activations  # type: ignore[attr-defined]
    assert wide.teacher == pytest.approx(2 * base.teacher, rel=0.1)  # type: ignore[attr-defined]
    assert of(chunk=64).logits == pytest.approx(2 * base.logits, rel=0.1)  # type: ignore[attr-defined]
    assert of(support=300).logits < 0.7 * base.logits  # type: ignore[attr-defined]
    assert of(listens=False).teacher == 0  # type: ignore[attr-defined]
    assert of(accumulate=2).total >= base.total  # type: ignore[attr-defined]
    assert of(bf16=True).activations < 0.9 * base.activations  # type: ignore[attr-defined]
    few, many = (of(chunk=1, support=ids) for ids in (300, 3000))
    rows = 2700 * 64 * 4  # kept for the whole run, and not gathered in a step
    assert many.total - few.total >= rows > 3 * (many.logits - few.logits)  # type: ignore[attr-defined]
    assert of(scored=101).logits == pytest.approx(base.logits, rel=0.02)  # type: ignore[attr-defined]


def taken(family: str, whole: bool, support: int, weights: dict[str, float], said: int = 0, lora: Any = None) -> tuple[int, int]:
    """A real step on real tensors, counted, and what was predicted from configs; the draft says `said` ids, 0 for all."""
    ids = torch.arange(said) if said else None
    rows = [(list(range(3, 40)), 20), (list(range(5, 33)), 4), (list(range(5, 33)), 8)]
    batch = collate(rows)
    scored = int(batch.scored.sum())
    with Live(*batch[:3]) as live:
        target = tiny(family)
        teacher = LiveTeacher(target)
        draft = tiny(family, seed=1).train() if whole else CutDraft(target, [0, 2])
        if lora:
            draft = with_lora(draft, **lora)  # type: ignore[arg-type]
        only = torch.arange(support) if support else None
        objective = DistillDraft(draft, teacher, weights, chunk=16, support=only, ids=ids)
        step_twice(objective, batch, live)
    expected = predict(
        FAMILIES[family](), FAMILIES[family]() if whole else [0, 2], 3, 37, scored, Asked(weights, 16, ids=ids), support=support, lora=lora,
    )  # fmt: skip
    return live.peak, expected.total


@pytest.mark.parametrize(
    "family, whole, support, weights, said",
    [
        ("llama", False, 0, {"forward_kl": 1.0}, 0),
        ("llama", False, 20, {"lk_lambda": 1.0, "ce_argmax": 0.1}, 0),
        ("llama", False, 20, {"forward_kl": 1.0}, 30),
        ("llama", False, 0, {"forward_kl": 1.0}, 30),
        ("gemma2", True, 0, {"jsd": 1.0}, 0),
        ("gemma2", True, 0, {"jsd": 1.0}, 30),
        ("gpt2", True, 0, {"ce_data": 1.0}, 0),
    ],
)
def test_a_real_step_takes_what_was_predicted(family: str, whole: bool, support: int, weights: dict[str, float], said: int) -> None:
    real, expected = taken(family, whole, support, weights, said)
    assert expected == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_of_adapters_takes_what_was_predicted(family: str) -> None:
    real, expected = taken(family, True, 0, {"forward_kl": 1.0}, lora={"rank": 4, "alpha": 8})
    assert expected == pytest.approx(real, rel=0.01)
    assert expected < taken(family, True, 0, {"forward_kl": 1.0})[1]


def test_a_prediction_leaves_the_config_that_it_reads_as_it_was() -> None:
    target = tiny()
    before = target.config.to_dict() | {"attention": target.config._attn_implementation}
    for draft in ([0, 2], target.config):
        predict(target.config, draft, 2, 8, 4, ASKED)
    assert target.config.to_dict() | {"attention": target.config._attn_implementation} == before


def test_what_cannot_be_predicted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(model: object, ids: torch.Tensor) -> object:
        return float(ids.sum())

    monkeypatch.setattr(memory, "last_hidden", asks)
    with pytest.raises(ValueError, match="what a llama takes cannot be predicted, for it does not run"):
        predict(CONFIG, [0], 1, 8, 4, ASKED)


def test_what_a_process_took_is_its_peak_beyond_what_it_held() -> None:
    """In a process of its own: a peak never falls, and here other tests have had theirs."""
    code = (
        "import torch; from draftsmith.distill.held import measured, resident\n"
        "before = resident(); one = torch.ones(25_000_000); del one; print(measured(before, 'cpu'))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert (
        95e6 < int(done.stdout) < 450e6
    )  # a system that takes pages away makes `before` too small; the whole process holds 480e6 before it
