"""What a step of exits is predicted to take is what it takes, tensor by tensor; and beside a target a decoder holds the heads alone."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from counted import step_twice
from draftsmith.distill import DistillExits, collate
from draftsmith.distill.chunked import Asked
from draftsmith.distill.exit_memory import predict_exits
from draftsmith.distill.held import Live
from draftsmith.distill.memory import Memory
from draftsmith.specdec import EarlyExitDrafter, generate, load_drafter
from draftsmith.specdec.drafters.exit_costs import added_bytes, copied_bytes
from draftsmith.specdec.drafters.exit_files import write_exits
from draftsmith.specdec.drafters.exit_heads import ExitSettings, make_head
from exits import KINDS
from tiny import FAMILIES, tiny

ASKED = Asked({"forward_kl": 1.0}, chunk=16)


def taken(
    family: str, exits: list[ExitSettings], support: int = 0, said: int = 0, weights: dict[str, float] | None = None
) -> tuple[int, int]:
    """A real step on real tensors, counted, and what was predicted from a config."""
    weights, ids = weights or {"forward_kl": 1.0}, torch.arange(said) if said else None
    with Live() as live:
        batch = collate([(list(range(3, 40)), 20), (list(range(5, 33)), 4), (list(range(5, 33)), 8)])
        scored, only = int(batch.scored.sum()), torch.arange(support) if support else None
        objective = DistillExits(tiny(family), exits, weights, chunk=16, support=only, ids=ids)
        step_twice(objective, batch, live)
    return live.peak, predict_exits(FAMILIES[family](), exits, 3, 37, scored, Asked(weights, 16, ids=ids), support=support).total


@pytest.mark.parametrize(
    "family, kinds, support, said, weights",
    [
        ("llama", ["adapter"], 0, 0, {}),
        ("llama", ["full", "block"], 20, 0, {"lk_lambda": 1.0, "ce_argmax": 0.1}),
        ("llama", ["block"], 20, 30, {}),
        ("gemma2", ["block", "full"], 0, 30, {"jsd": 1.0}),
        ("gpt2", ["adapter", "full"], 0, 0, {"ce_data": 1.0}),
        ("llama", ["lora", "adapter"], 20, 0, {}),
    ],
)
def test_a_real_step_of_exits_takes_what_was_predicted(
    family: str, kinds: list[str], support: int, said: int, weights: dict[str, float]
) -> None:
    real, expected = taken(family, [KINDS[kind] for kind in kinds], support, said, weights)
    assert expected == pytest.approx(real, rel=0.005)


def test_what_stays_is_counted_to_the_byte_and_each_part_grows_with_what_it_is_of() -> None:
    target = tiny()
    heads = [KINDS["adapter"], KINDS["full"]]

    def of(
        exits: list[ExitSettings] = heads, rows: int = 2, length: int = 64, scored: int = 100, chunk: int = 32, **more: Any
    ) -> Memory:
        return predict_exits(target.config, exits, rows, length, scored, ASKED._replace(chunk=chunk), **more)

    base, weights = of(), sum(added_bytes([make_head(target, one)]) for one in heads)
    assert base.target == sum(one.numel() * 4 for one in target.parameters())
    assert (base.draft, base.gradients, base.moments) == (weights, weights, 2 * weights)
    assert sum(base[:4]) < base.total <= sum(base[:-1])
    small = of([KINDS["block"]], rows=1, length=2, scored=1, chunk=1)
    assert small.total >= sum(small[:4]), "the step's end, where all gradients are there"
    assert of(rows=4).teacher == pytest.approx(2 * base.teacher, rel=0.1)
    assert of(scored=200).activations == pytest.approx(2 * base.activations, rel=0.1)
    assert of(rows=4).activations == base.activations, "adapters see scored positions only"
    assert of([KINDS["block"]], rows=4).activations > 1.9 * of([KINDS["block"]]).activations
    assert of(chunk=64).logits > 1.5 * base.logits
    assert of(support=20).logits < base.logits
    assert of(accumulate=2).total >= base.total
    half = of(dtype=torch.bfloat16)
    assert (half.target, half.draft) == (base.target // 2, base.draft), "heads are in float32"
    assert of([KINDS["block"]], bf16=True).activations < of([KINDS["block"]]).activations
    assert of([KINDS["block"]], bf16=True, dtype=torch.bfloat16).draft == of([KINDS["block"]]).draft


def test_what_cannot_be_predicted_of_exits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(_: object, batch: Any) -> object:
        return float(batch.ids.sum())

    monkeypatch.setattr(DistillExits, "loss", asks)
    with pytest.raises(ValueError, match="what exits of a llama take cannot be predicted, for it does not run"):
        predict_exits(tiny().config, [KINDS["adapter"]], 1, 8, 4, ASKED)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_the_target_a_drafter_holds_its_heads_and_a_call_leaves_nothing(kind: str, tmp_path: Path) -> None:
    target, prompt = tiny(), [5, 9, 11, 4, 8]
    head = make_head(target, KINDS[kind])
    write_exits(tmp_path, target, [(KINDS[kind], head)], KINDS[kind].layer)
    generate(target, [prompt], load_drafter(tmp_path, target), max_new_tokens=8)  # what is made once in a process
    for ids in (0, 30):
        with Live(*target.parameters(), *target.buffers()) as live:
            read: Any = load_drafter(tmp_path, target)
            drafter = EarlyExitDrafter(target, read.layer, read.head, ids=torch.arange(ids) if ids else None)
            del read
            gc.collect()
            assert live.now == added_bytes([head]) + copied_bytes(target, ids) + 8 * ids, "the ids themselves are int64"
            before = live.now
            generate(target, [prompt], drafter, k=3, max_new_tokens=8)
            gc.collect()
            if drafter.head.own_trunk:
                assert live.now > before, "its own cache stays until its next call"
            else:
                assert live.now - before < 1000, "of the call, no cache and no state stays"
            del drafter


def test_of_a_target_in_parts_a_process_holds_its_part_and_two_blocks_while_it_reads() -> None:
    asked: Any = (FAMILIES["llama"](), [KINDS["adapter"]], 2, 16, 8, ASKED)
    whole, parts = predict_exits(*asked), predict_exits(*asked, shards=2)
    sizes = [sum(one.numel() for one in block.parameters()) * 4 for block in tiny().model.layers]
    assert whole.target - parts.target == sum(sizes) // 2
    assert parts.teacher - whole.teacher == 2 * max(sizes)
    assert whole.total - parts.total == sum(sizes) // 2 - 2 * max(sizes)  # the target's forward is the height of both
