"""What a step reads of a model, and which candidates have laws."""

from __future__ import annotations

from draftsmith.eval.candidates import kind_of, read_bytes
from draftsmith.specdec import CombinedDrafter, EarlyExitDrafter, NgramDrafter
from tiny import VOCABULARY, tiny


def test_bytes_are_of_all_that_a_step_reads_so_of_an_input_embedding_apart_from_the_head_none() -> None:
    target = tiny("llama")
    every = 4 * sum(one.numel() for one in target.parameters())
    assert read_bytes(target) == every - 4 * VOCABULARY * 32
    tied = tiny("llama", tie_word_embeddings=True)
    assert read_bytes(tied) == 4 * sum(one.numel() for one in tied.parameters())
    assert read_bytes(None) == 0
    layer = 4 * sum(one.numel() for one in target.model.layers[2].parameters())
    assert read_bytes(EarlyExitDrafter(target, 2).model) == read_bytes(target) - layer
    assert read_bytes(target.bfloat16()) == (every - 4 * VOCABULARY * 32) // 2


def test_who_drafts_all_that_it_is_asked_for() -> None:
    target = tiny("llama")
    exit_ = EarlyExitDrafter(target, 1)
    assert [kind_of(one) for one in (exit_, CombinedDrafter(NgramDrafter(), exit_), NgramDrafter())] == [
        "model",
        "combined",
        "lookup",
    ]
