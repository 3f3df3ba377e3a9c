"""What is asked of a drafter before it proposes: of the rows that go on alone, and it hears which of its ways was taken."""

from __future__ import annotations

from types import SimpleNamespace

from draftsmith.specdec.drafting import choose


class Ways:
    """A drafter with two ways, over three rows."""

    def __init__(self) -> None:
        self.chosen: list[int] = []

    def ways(self) -> list[list[int]]:
        return [[7, -1, 0], [0, 0, 3]]

    def choose(self, way: int) -> None:
        self.chosen.append(way)


def test_the_way_that_a_pace_takes_is_told_and_rests_on_the_rows_that_go_on() -> None:
    drafter, asked = Ways(), []

    def second(ways: list[list[int]]) -> tuple[int, int]:
        asked.append(ways)
        return 4, 1

    assert choose(SimpleNamespace(sure=False, choose=second), drafter, 3, [0, 2]) == (4, [0, 3])
    assert asked == [[[7, 0], [0, 3]]]
    assert drafter.chosen == [1]


def test_a_pace_that_knows_no_ways_gets_the_first_and_a_sure_one_asks_for_none() -> None:
    drafter, asked = Ways(), []

    def plain(evidence: list[int]) -> int:
        asked.append(evidence)
        return 2

    assert choose(SimpleNamespace(sure=False, next=plain), drafter, 3, [1, 2]) == (2, [-1, 0])
    assert choose(SimpleNamespace(sure=True, next=plain), drafter, 3, [1, 2]) == (2, [0, 0])
    one = SimpleNamespace(evidence=lambda: [5, 6, -1])
    assert choose(SimpleNamespace(sure=False, next=plain), one, 3, [0, 2]) == (2, [5, -1])
    assert choose(SimpleNamespace(sure=False, next=plain), None, 3, [0]) == (2, [0])
    assert asked == [[-1, 0], [0, 0], [5, -1], [0]]
    assert not drafter.chosen
