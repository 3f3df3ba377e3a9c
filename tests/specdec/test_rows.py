"""Rows of a call, without a model: where each ends, what of a round is counted then, and which slots are left."""

from __future__ import annotations

from typing import Any

from draftsmith.specdec import Generation, Sampling
from draftsmith.specdec.result import Written
from draftsmith.specdec.rows import Rows
from draftsmith.specdec.settings import Settings

EOS = 2


def begun(count: int, **more: Any) -> tuple[Rows, Generation, list[Written]]:
    fields: dict[str, Any] = {
        "k": 3, "max_new_tokens": 6, "min_new_tokens": 0, "how": Sampling(), "ends": frozenset([EOS]), "seed": 0, "verify": "token",
        "processors": (), "stop_strings": (), "vocabulary": 61, "rows": 61,
    }  # fmt: skip
    out = Generation([[] for _ in range(count)], [[] for _ in range(count)], ["length"] * count, [[] for _ in range(count)])
    told: list[Written] = []
    return Rows([[1]] * count, Settings(**fields | more), None, told.append, out), out, told


def test_a_row_ends_at_its_first_eos_and_drafts_behind_it_were_never_drafted() -> None:
    rows, out, told = begun(3)
    own = [[-0.5] * 4] * 3
    rows.write([[5, EOS, 7], [5, EOS, 7], [5, 6, 7]], [3, 3, 2], [3, 1, 0], [9, EOS, 9], own)
    assert out.tokens == [[5, EOS], [5, EOS], [9]]
    assert out.rounds == [[(1, 1)], [(3, 1)], [(2, 0)]], "a draft that was refused was drafted, one behind the end was not"
    assert out.ends == ["eos", "eos", "length"]
    assert out.logprobs == [[-0.5] * 2, [-0.5] * 2, [-0.5]]
    assert told == [Written(0, [5, EOS], 2), Written(1, [5, EOS], 1), Written(2, [9], 0)]
    assert rows.done == [True, True, False]


def test_room_is_left_for_the_targets_own_token_and_an_ended_row_has_none() -> None:
    rows, out, _ = begun(2)
    assert rows.room() == [5, 5]
    rows.write([[5, 6], []], [2, 0], [2, 0], [7, EOS], None)
    assert (rows.room(), rows.counted([2, 2]), rows.going()) == ([2, 0], [2, -1], [0])
    rows.write([[5, 6], [5, 6]], [2, 2], [2, 2], [7, 7], None)
    assert out.tokens == [[5, 6, 7, 5, 6, 7], [EOS]]
    assert rows.done == [True, True]
    assert out.ends == ["length", "eos"]


def test_slots_that_are_given_up_leave_the_others_in_order() -> None:
    rows, out, told = begun(3)
    rows.write([[]] * 3, [0] * 3, [0] * 3, [4, EOS, 8], None)
    assert rows.drop() == [0, 2]
    assert (rows.done, rows.texts) == ([False, False], [[4], [8]])
    rows.write([[], []], [0, 0], [0, 0], [5, 9], None)
    assert out.tokens == [[4, 5], [EOS], [8, 9]]
    assert [one.row for one in told] == [0, 1, 2, 0, 2]
