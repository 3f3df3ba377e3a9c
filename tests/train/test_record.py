"""What a run says of itself before it learns anything."""

from __future__ import annotations

from draftsmith.distill import CutDraft, WholeDraft
from draftsmith.distill.batch import Example
from draftsmith.train.data.plan import Rows
from draftsmith.train.record import longest_row, reach
from tiny import noisy, tiny


def test_how_far_rows_reach_is_said_where_the_draft_reads_further() -> None:
    def rows(*lengths: int) -> Rows:
        return Rows([Example([3] * length, ((1, length),)) for length in lengths], [], {}, {})

    target = tiny(max_position_embeddings=32)
    for draft in (CutDraft(target, [0, 1]), WholeDraft(noisy(target), target)):
        said = reach(draft, rows(9, 31, 12))
        assert said is not None
        assert said.startswith("the longest row has 31 tokens, the draft reads 32")
        assert "data.max_length" in said
        assert reach(draft, rows(9, 32)) is None
    assert longest_row(rows()) == 0
