"""Expected tokens a call: against brute force, against the decoder itself, and never over a row's end."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.distill import CutDraft, DistillDraft, acceptance, collate
from draftsmith.distill.block_length import block_length, block_sums, block_tokens, runs
from draftsmith.distill.signal import Overlap
from draftsmith.specdec import ModelDrafter, generate
from tiny import noisy, tiny


def by_hand(rows: list[list[float]], k: int) -> float:
    """What a decoder does, step by step: draft while there is room for one more token behind, stop at the first refusal."""
    blocks = []
    for row in rows:
        for start in range(len(row)):
            left, expected, chance = len(row) - start, 1.0, 1.0
            for i in range(min(k, left - 1)):
                chance *= row[start + i]
                expected += chance
            blocks.append(expected)
    return sum(blocks) / len(blocks)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 40])
def test_the_block_length_is_the_mean_of_per_block_products(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    rows = [torch.rand(n, generator=generator, dtype=torch.float64) for n in (1, 2, 3, 7, 30)]
    assert math.isclose(block_length(rows, k), by_hand([row.tolist() for row in rows], k), rel_tol=1e-12)


def test_closed_forms_and_the_end_of_a_row() -> None:
    assert block_tokens(torch.ones(6), 3).tolist() == [4, 4, 4, 3, 2, 1]  # never more than the text has left
    assert block_tokens(torch.zeros(3), 4).tolist() == [1, 1, 1]
    assert block_tokens(torch.full((200,), 0.5), 3)[0] == 1 + 0.5 + 0.25 + 0.125
    assert block_tokens(torch.tensor([0.9]), 4).tolist() == [1]
    assert block_length([torch.ones(2), torch.zeros(0)], 4) == 1.5
    with pytest.raises(ValueError, match="no position at all"):
        block_length([torch.zeros(0)], 4)


def test_it_is_not_a_product_of_means() -> None:
    """Hard positions come together: half the rows all kept, half all refused, have a mean of 0.5 and far longer blocks than 0.5 gives."""
    rows = [torch.ones(100), torch.zeros(100)]
    assert block_length(rows, 4) > 2.9
    assert block_length([torch.full((200,), 0.5)], 4) < 1.95


def test_runs_end_with_rows_and_with_turns() -> None:
    scored = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    assert runs(scored) == [2, 3, 1, 7]
    alphas = torch.rand(13, generator=torch.Generator().manual_seed(0))
    each = Overlap(alphas, (alphas + 1) / 2, alphas > 0.5)
    sums = block_sums(scored, each, 3)
    for name, values in (("block_length", each.low), ("block_length_at_most", each.high), ("greedy_block_length", each.agrees)):
        rows = [row.double().tolist() for row in values.split([2, 3, 1, 7])]
        assert math.isclose(sums[name], 13 * by_hand(rows, 3), rel_tol=1e-9), name
    assert sums["block_length"] < sums["block_length_at_most"]


@pytest.mark.parametrize("k", [1, 3])
def test_greedy_blocks_are_those_of_the_decoder(k: int) -> None:
    """From every place of the target's own greedy text, the decoder's first drafted round yields what the figure says."""
    target = tiny()
    draft = noisy(target, 0.12)
    prompt = [5, 9, 11]
    text = generate(target, [prompt], max_new_tokens=24).tokens[0]
    objective = DistillDraft(draft, target)
    objective.trainable.eval()
    loss = objective.loss(collate([(prompt + text, len(prompt))]))
    assert loss.each is not None
    expected = block_tokens(loss.each.agrees, k)
    yields = []
    for start in range(1, len(text)):  # a call's first round is behind a token that the prefill said
        out = generate(target, [prompt + text[: start - 1]], ModelDrafter(draft), k=k, max_new_tokens=len(text) - start + 1)
        yields.append(out.rounds[0][1][1] + 1)
    assert yields == expected[1:].tolist()
    assert 1 < sum(yields) / len(yields) < k + 1, "a draft that is always or never right tests nothing"


@pytest.mark.parametrize("narrow", [False, True])
def test_in_eval_mode_a_loss_gives_each_scored_position_in_order(narrow: bool) -> None:
    target = tiny()
    draft = CutDraft(target, [0, 1])
    support = torch.tensor([4, 5, 9, 20, 21]) if narrow else None
    objective = DistillDraft(draft, target, chunk=3, support=support)
    batch = collate([([5, 9, 11, 4, 20], 2), ([7, 3, 20, 21, 9, 9, 5, 4], 1)])
    objective.trainable.train()
    assert objective.loss(batch).each is None
    objective.trainable.eval()
    loss = objective.loss(batch)
    assert loss.each is not None
    with torch.no_grad():
        p, q = target(input_ids=batch.ids).logits[batch.scored], draft.head(draft(*draft.inputs(batch)))
    assert torch.allclose(loss.each.low, acceptance(q, p), atol=1e-6)
    assert torch.equal(loss.each.high, loss.each.low)
    assert torch.equal(loss.each.agrees, p.argmax(-1) == q.argmax(-1))
    assert math.isclose(float(loss.each.low.sum()), float(loss.metrics["acceptance"]), rel_tol=1e-6)
    nothing = objective.loss(collate([([5, 9], 2)]))  # a row of which nothing is scored
    assert nothing.each is not None
    assert len(nothing.each.low) == 0
    assert float(nothing.metrics["judged"]) == 0
