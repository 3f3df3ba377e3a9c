"""What a quantisation costs is told by the numbers of the file, over the held-out rows, as a plain loop over all laws counts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.recipes import Recipe, load_recipe
from draftsmith.specdec import load
from draftsmith.train.export import cost
from draftsmith.train.export.cost import interval
from draftsmith.train.export.gguf_family import with_numbers
from draftsmith.train.export.gguf_file import read_tensors, write_gguf
from draftsmith.train.export.gguf_tokenizer import vocabulary
from finished import ROWS, with_chats, with_export
from runs import write_run
from tiny import noisy, tiny_tokenizer, uneven

TOKENIZER = tiny_tokenizer()


def chats(place: Path) -> Recipe:
    recipe = with_chats(load_recipe(write_run(place)), place, 12)
    return with_export(recipe, quantization="q4_0", format="gguf", split="gpt-2")


def by_hand(recipe: Recipe, draft: Any, rows: list[Any]) -> tuple[float, float, int]:
    """(sum of min(p, q), sum of equal argmaxes, tokens), a row at a time, with no code of the judge's."""
    target, _ = load(recipe.target.model)
    accepted, agreed, tokens = 0.0, 0, 0
    for row in rows:
        with torch.no_grad():
            p, q = (one(input_ids=torch.tensor([row.ids])).logits[0].double().softmax(-1) for one in (target, draft))
        for start, end in row.spans:
            for at in range(start - 1, end - 1):
                accepted += float(torch.minimum(p[at], q[at]).sum())
                agreed += int(p[at].argmax() == q[at].argmax())
                tokens += 1
    return accepted, agreed, tokens


def test_both_drafts_are_judged_on_the_held_out_rows(tmp_path: Path) -> None:
    recipe = chats(tmp_path)
    target, tokenizer = load(recipe.target.model)
    before, after = noisy(target, 0.05), noisy(target, 0.3)
    found = cost.cost(recipe, tokenizer, before, after)
    rows = cost._held_out(recipe, target, tokenizer)
    assert len(rows) == 6
    for draft, means in ((before, found.before), (after, found.after)):
        accepted, agreed, tokens = by_hand(recipe, draft, rows)
        assert tokens == found.scored == found.held_out
        assert means["acceptance"] == pytest.approx(accepted / tokens, abs=1e-6)
        assert means["agreement"] == pytest.approx(agreed / tokens)
    change = found.after["acceptance"] - found.before["acceptance"]
    assert found.low < change < found.high
    assert change < -0.01
    same = cost.cost(recipe, tokenizer, before, before)
    assert (same.before, same.low, same.high) == (same.after, 0, 0)


def test_a_sample_is_drawn_from_all_of_the_held_out_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = chats(tmp_path)
    target, tokenizer = load(recipe.target.model)
    rows = cost._held_out(recipe, target, tokenizer)
    monkeypatch.setattr(cost, "SAMPLE", max(row.scored for row in rows) + 1)
    some = cost._sample(rows, 0)
    assert len(some) == 2
    assert {tuple(one.ids) for seed in range(20) for one in cost._sample(rows, seed)} == {tuple(one.ids) for one in rows}
    found = cost.cost(recipe, tokenizer, target, noisy(target, 0.1))
    assert found.scored < found.held_out == sum(row.scored for row in rows)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("olmo2", {})]
)
def test_the_numbers_of_a_file_are_put_back_where_they_came_from(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made = uneven(family, vocab_size=ROWS, **changes)
    words = vocabulary(TOKENIZER, ROWS, split="gpt-2")
    for form in ("f32", "q4_0"):
        write_gguf(tmp_path / "m.gguf", made, words, form)
        back = with_numbers(made, {name: one.values for name, one in read_tensors(tmp_path / "m.gguf")})
        for name, value in made.state_dict().items():
            kept = back.state_dict()[name]
            near = 0 if form == "f32" or value.dim() < 2 else float(value.abs().max()) / 7
            assert (kept - value).abs().max() <= near, name
            assert torch.equal(kept, value) == (form == "f32" or value.dim() < 2), name


def test_what_was_not_measured_is_said_with_its_reason(tmp_path: Path) -> None:
    recipe = load_recipe(write_run(tmp_path))
    target, tokenizer = load(recipe.target.model)
    said = cost.told(recipe, tokenizer, target, target)
    assert said.startswith("what f16 costs in acceptance was not measured: ")
    assert "answers.jsonl, the answers that the draft was trained on, is not there" in said
    assert not (recipe.folder / "answers.jsonl").exists()


def test_the_interval_is_that_of_rows_and_not_of_tokens() -> None:
    assert interval([(1.0, 10), (1.0, 10), (1.0, 10)]) == pytest.approx((0.1, 0.1))
    low, high = interval([(0.0, 10), (2.0, 10)])
    # Two rows whose means are 0 and 0.2: the error of their mean is their distance, halved.
    assert (low, high) == pytest.approx((0.1 - 1.96 * 0.1, 0.1 + 1.96 * 0.1))
    assert interval([(0.3, 3)]) == (-float("inf"), float("inf"))
