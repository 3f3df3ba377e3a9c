"""Rows to masks: what is scored is what an answer holds, in rows of one turn and of many, alone or in a shared sequence."""

from __future__ import annotations

import pytest
import torch

from draftsmith.distill import Batch, CutDraft, DistillDraft, collate
from draftsmith.distill.batch import Example, example
from tiny import tiny

CHAT = Example([5, 9, 11, 4, 2, 30, 31, 40, 2, 7], ((3, 5), (7, 9)))  # the last token is a template's, not the target's
SHORT = Example([8, 6, 2], ((2, 3),))
SILENT = Example([3, 4], ())


def test_each_token_of_each_span_is_predicted_and_no_other() -> None:
    batch = collate([CHAT, SHORT, ([7, 8, 2], 1), SILENT], pad=2)
    assert batch.ids.roll(-1, dims=1)[batch.scored].tolist() == [4, 2, 40, 2, 2, 8, 2]
    assert batch.scored[0].nonzero().flatten().tolist() == [2, 3, 6, 7]
    assert batch.real.sum(1).tolist() == [10, 3, 3, 2]
    assert batch.documents is None
    assert CHAT.scored == 4
    assert CHAT.answers == [4, 2, 40, 2]


def test_a_prompt_length_is_one_span_to_the_end() -> None:
    assert example(([1, 2, 3], 2)) == Example([1, 2, 3], ((2, 3),))
    assert example(([1, 2, 3], 3)) == Example([1, 2, 3], ())
    assert example(([1, 2, 3], [[1, 2]])) == Example([1, 2, 3], ((1, 2),))  # type: ignore[list-item]


@pytest.mark.parametrize("spans", [[(0, 1)], [(2, 2)], [(1, 5)], [(3, 4), (1, 2)], [(1, 3), (2, 4)], [(3, 2)]])
def test_spans_that_cannot_be_are_named(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"row 1: the spans .* in a row of 4 tokens"):
        collate([SHORT, ([1, 2, 3, 4], spans)])
    for prompt in (0, 5):
        with pytest.raises(ValueError, match=r"row 0: a prompt of .* in a row of 4 tokens"):
            collate([([1, 2, 3, 4], prompt)])


def test_rows_in_one_sequence_keep_their_masks_and_none_predicts_the_next_ones_first_token() -> None:
    apart, packed = collate([CHAT, SHORT, SILENT]), collate([[SHORT, CHAT, SILENT], [SHORT]])
    assert packed.ids.shape == (2, 15)
    assert packed.documents is not None
    assert packed.documents.tolist() == [[0] * 3 + [1] * 10 + [2] * 2, [0] * 3 + [-1] * 12]
    assert packed.real.tolist() == [[True] * 15, [True] * 3 + [False] * 12]
    there = [(ids.tolist(), scored.tolist()) for ids, scored in packed.rows()]
    alone = [(ids.tolist(), scored.tolist()) for ids, scored in apart.rows()]
    assert there == [alone[1], alone[0], alone[2], alone[1]]
    assert packed.ids.roll(-1, dims=1)[packed.scored].tolist() == [2, 4, 2, 40, 2, 2]
    moved = packed.to(torch.device("cpu"))
    assert torch.equal(moved.ids, packed.ids)
    assert moved.documents is not None
    assert apart.to(torch.device("cpu")).documents is None


def test_the_words_of_users_are_read_and_never_learned() -> None:
    """A probe of each position: a change of the target's law there changes the loss exactly where the mask says so."""
    target = tiny()
    objective = DistillDraft(CutDraft(target, [0, 1]), target)
    batch = collate([CHAT])

    def loss(mask: Batch) -> float:
        return float(objective.loss(mask).total.detach())

    one_by_one = [loss(batch._replace(scored=torch.arange(10)[None] == at)) for at in (2, 3, 6, 7)]
    assert abs(sum(one_by_one) - loss(batch)) < 1e-4
    later = batch.ids.clone()
    later[0, 9] = 50  # behind the last scored prediction
    assert loss(batch._replace(ids=later)) == loss(batch)
    user = batch.ids.clone()
    user[0, 5] = 50  # a user's token between the turns: no target of any prediction that counts, but the context of the second turn
    only_first = batch.scored & (torch.arange(10) < 5)
    assert loss(batch._replace(ids=user, scored=only_first)) == loss(batch._replace(scored=only_first))
    assert abs(loss(batch._replace(ids=user)) - loss(batch)) > 1e-5
