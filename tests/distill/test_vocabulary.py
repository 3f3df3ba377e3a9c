"""A draft that says a part of the ids: which ones, what it is taught, and that the same ids come back from its folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.distill import CutDraft, DistillDraft, WholeDraft, collate
from draftsmith.distill.draft import Origin
from draftsmith.distill.making.vocabulary import always_said, frequent
from draftsmith.specdec import ModelDrafter, Sampling, generate, load, load_drafter
from tiny import noisy, plain_greedy, tiny, tiny_folder, tiny_tokenizer

ROWS = [([5, 9, 11, 4, 2], 3), ([7, 8, 2], 1), ([3, 3, 20, 21, 22, 23, 24, 2], 6)]
IDS = torch.tensor([0, 2, 4, 8, 9, 20, 24, 33, 60])


def test_the_ids_are_the_answers_most_frequent_and_prompts_do_not_count() -> None:
    rows = [([9, 9, 9, 9, 5, 6, 5, 2], 4), ([9, 6, 5, 7, 2], 1)]  # answers: 5 5 5 6 6 7 2 2
    trim = frequent(rows, 3, 12, always=[0])
    assert trim.ids.tolist() == [0, 2, 5], "2 and 6 are equals: the lower id"
    assert trim.coverage == 5 / 8
    assert math.isnan(trim.held_out)
    assert trim.table.tolist() == [0, -1, 1, -1, -1, 2, *[-1] * 6]
    whole = frequent(rows, 7, 12, held_out=[([1, 5, 6, 11, 11], 1)])
    assert whole.ids.tolist() == [0, 1, 2, 3, 5, 6, 7], "what the answers do not hold is filled from the lowest id on"
    assert (whole.coverage, whole.held_out) == (1.0, 0.5)
    assert str(whole) == "7 of 12 ids: 100.00% of the answer tokens, 50.00% of those held out"


def test_sizes_and_ids_that_cannot_be_served_are_refused() -> None:
    for size in (0, 1, 13):
        with pytest.raises(ValueError, match=r"of 2 ids|of 0 ids|of 1 ids|of 13 ids.*ask for 2\.\.12"):
            frequent(ROWS[:1], size, 12, always=[1, 2])
    with pytest.raises(ValueError, match="hold id 24"):
        frequent(ROWS, 3, 24)
    with pytest.raises(ValueError, match=r"a draft vocabulary of 99 ids asked; the target has 61"):
        frequent(ROWS, 99, 61)


def test_what_ends_a_text_and_special_tokens_are_always_said() -> None:
    target = tiny(vocab_size=260)
    target.generation_config.eos_token_id = [2, 107]
    assert always_said(target, tiny_tokenizer()) == [0, 1, 2, 107]


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "total_variation"])
@pytest.mark.parametrize("chunk", [1, 100])
@pytest.mark.parametrize("kind", ["cut", "whole", "tied", "soft-capped"])
def test_a_trimmed_draft_learns_what_its_whole_law_with_no_chance_outside_would(kind: str, chunk: int, name: str) -> None:
    """Against a naive computation on [N, V] laws: the draft's has e^-30 for all ids outside together, and the target's is whole."""
    target = tiny("gemma2" if kind == "soft-capped" else "llama", tie_word_embeddings=kind in ("tied", "soft-capped"))
    draft = CutDraft(target, [0, 2]) if kind == "cut" else WholeDraft(noisy(target, 0.3))
    objective = DistillDraft(draft, target, name, chunk=chunk, ids=IDS)
    batch = collate(ROWS)
    loss = objective.loss(batch)
    loss.total.backward()
    found = {name: one.grad.clone() for name, one in draft.named_parameters() if one.grad is not None}
    draft.zero_grad()
    logits = draft.head(draft(*draft.inputs(batch)))
    q = logits[:, IDS].softmax(-1)
    p = target(input_ids=batch.ids).logits[batch.scored].detach().softmax(-1)
    outside = (1 - p[:, IDS].sum(-1)).clamp_min(1e-9)
    inside, never = p[:, IDS], math.exp(-30)
    naive = {
        "forward_kl": (inside * (inside.log() - q.log())).sum(-1) + outside * (outside.log() + 30),
        "reverse_kl": (q * (q.log() - inside.log())).sum(-1) + never * (-30 - outside.log()),
        "total_variation": 0.5 * ((inside - q).abs().sum(-1) + outside),
    }[name].sum()
    naive.backward()
    assert abs(float(loss.total) - float(naive)) < 1e-3 * max(1, abs(float(naive)))
    for name, one in draft.named_parameters():
        if one.grad is not None:
            assert torch.allclose(found[name], one.grad, atol=1e-4, rtol=1e-3), name
    kept = torch.minimum(inside, q).sum()
    assert abs(float(loss.metrics["acceptance"]) - float(kept)) < 1e-4, "acceptance is under the whole law of the target"
    says = IDS[q.argmax(-1)]
    assert float(loss.metrics["agreement"]) == float((says == p.argmax(-1)).sum())
    if kind == "whole":  # a head of its own
        others = torch.ones(61, dtype=torch.bool).index_fill(0, IDS, False)
        assert float(found["model.lm_head.weight"][others].abs().max()) == 0


def test_a_draft_of_all_ids_is_a_draft() -> None:
    target, batch, everything = tiny(), collate(ROWS), torch.arange(61)
    for loss in ("forward_kl", "reverse_kl"):
        draft = CutDraft(target, [0, 1])
        whole, trimmed = (DistillDraft(draft, target, loss, ids=ids).loss(batch) for ids in (None, everything))
        assert abs(float(whole.total) - float(trimmed.total)) < 1e-3
        assert abs(float(whole.metrics["acceptance"]) - float(trimmed.metrics["acceptance"])) < 1e-4


def test_a_support_lies_within_the_ids_and_the_figures_stay_whole() -> None:
    target, batch = tiny(), collate(ROWS)
    draft = CutDraft(target, [0, 1])
    few = DistillDraft(draft, target, support=IDS[1:4], ids=IDS)
    plain = DistillDraft(draft, target, ids=IDS)
    assert float(few.loss(batch).total) != float(plain.loss(batch).total)
    assert float(few.loss(batch).metrics["acceptance"]) == float(plain.loss(batch).metrics["acceptance"])
    few.trainable.eval()
    assert float(few.loss(batch).total) == float(plain.loss(batch).total)
    with pytest.raises(ValueError, match="a support holds ids that the draft cannot say"):
        DistillDraft(draft, target, support=torch.tensor([4, 5]), ids=IDS)
    for wrong, message in (
        ([3, 2], "ascending"),
        ([2, 2], "ascending"),
        ([4, 61], r"0\.\.60"),
        ([-1, 4], r"0\.\.60"),
        ([], "ascending"),
    ):
        with pytest.raises(ValueError, match=message):
            DistillDraft(draft, target, ids=torch.tensor(wrong, dtype=torch.long))


@pytest.mark.parametrize("kind", ["cut", "whole", "tied"])
def test_a_trimmed_draft_is_saved_whole_and_our_decoder_cuts_it_again(kind: str, tmp_path: Path) -> None:
    name = tiny_folder(tmp_path / "target", seed=2, tie_word_embeddings=kind == "tied")
    target, tokenizer = load(name)
    rows = [(tokenizer(text).input_ids, 2) for text in ("the heron there", "thither", "a path")]
    trim = frequent(rows, 24, len(tokenizer), always=always_said(target, tokenizer))
    draft = CutDraft(target, [0, 2]) if kind == "cut" else WholeDraft(noisy(target, 0.1))
    objective = DistillDraft(draft, target, ids=trim.ids, origin=Origin(name, "r", tokenizer))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(6):
        optimizer.zero_grad()
        objective.loss(collate(rows)).total.backward()
        optimizer.step()
    objective.save(tmp_path / "draft")
    assert json.loads((tmp_path / "draft" / "drafter.json").read_text())["settings"] == {"ids": "draft_ids.json"}
    assert not [one for one in (tmp_path / "draft").glob("*.safetensors") if one.name != "model.safetensors"], (
        "engines read them all"
    )
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.config.tie_word_embeddings == (kind == "tied")
    draft.eval()
    batch = collate(rows)
    with torch.no_grad():
        wanted, found = draft.head(draft(*draft.inputs(batch))), plain(input_ids=batch.ids).logits[batch.scored]
    assert found.shape[-1] == 260
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3), "the head is whole again, rows that were not trained included"
    drafter = load_drafter(tmp_path / "draft", target, tokenizer)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.ids == 24
    prompts = [tokenizer("the herons").input_ids, tokenizer("zz").input_ids]
    for k in (1, 4):
        out = generate(target, prompts, drafter, k=k, max_new_tokens=16)
        assert out.tokens == [plain_greedy(target, prompt, 16) for prompt in prompts]
    both = load_drafter(f"ngram+{tmp_path / 'draft'}", target, tokenizer)
    assert both.drafter.ids == 24  # type: ignore[attr-defined]
    assert generate(target, prompts, both, max_new_tokens=16).tokens == out.tokens
    assert generate(target, prompts, both, max_new_tokens=16, how=Sampling(1.0)).tokens
