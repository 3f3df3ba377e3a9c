"""A draft that says a part of the ids: it proposes what the whole draft would if it had no other, and the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.specdec import (
    CombinedDrafter,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    generate,
    load,
    load_drafter,
    prepare_for_decoding,
    to_probs,
)
from tiny import FAMILIES, begin, noisy, plain_greedy, tiny, tiny_folder

IDS = torch.tensor([2, 3, 4, 9, 11, 17, 20, 21, 24, 33, 40, 41, 57])
PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25, 3, 3]]
TARGET = tiny("llama")
WANTED = [plain_greedy(TARGET, prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_its_law_is_the_whole_drafts_given_that_the_token_is_one_of_its_ids(family: str) -> None:
    model = tiny(family)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    how, text = Sampling(0.9, top_k=7, top_p=0.95), [5, 9, 11, 4]
    drafter = ModelDrafter(model, ids=IDS)
    assert drafter.ids == len(IDS)
    begin(drafter, [text])
    out = drafter.propose(4, how, torch.Generator().manual_seed(0))
    assert out.probs is not None
    assert out.probs.shape == (1, 4, 58), "up to its last id; the decoder widens it to the target's"
    logits = torch.full((4, 61), -torch.inf)
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([[*text, *out.tokens[0].tolist()]])).logits[0, 3:7]
    logits[:, IDS] = whole[:, IDS]
    assert torch.allclose(out.probs[0], to_probs(logits, how)[:, :58], atol=1e-5)
    assert torch.isin(out.tokens, IDS).all()
    begin(drafter, [text])
    greedy = drafter.propose(4, Sampling())
    assert greedy.probs is None, "no law of V numbers at temperature 0"
    assert greedy.tokens[0, 0] == IDS[whole[0, IDS].argmax()]
    assert model.get_output_embeddings().weight.shape[0] == 61
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("prepared", [False, True])
def test_greedy_text_is_the_targets_own(k: int, prepared: bool) -> None:
    ids = torch.unique(torch.cat([IDS, torch.tensor(WANTED[0])]))
    for drafter in (
        ModelDrafter(noisy(TARGET), ids=ids),
        ModelDrafter(noisy(TARGET), vocab_size=61, ids=IDS),
        CombinedDrafter(NgramDrafter(least=0.0), ModelDrafter(noisy(TARGET), ids=IDS), 2),
    ):
        if prepared:
            prepare_for_decoding(drafter.model)
        out = generate(TARGET, PROMPTS, drafter, k=k, max_new_tokens=30)
        assert out.tokens == WANTED
        for prompt, text, rounds in zip(PROMPTS, WANTED, out.rounds, strict=True):
            alone = generate(TARGET, [prompt], drafter, k=k, max_new_tokens=30)
            assert alone.tokens == [text]
            assert alone.rounds == [rounds]


def test_a_target_that_says_nothing_else_accepts_all_of_its_own_trimmed_self() -> None:
    ids = torch.unique(torch.tensor(WANTED[0]))
    out = generate(TARGET, PROMPTS[:1], ModelDrafter(TARGET, ids=ids), k=4, max_new_tokens=30)
    assert out.tokens == WANTED[:1]
    assert all(drafted == accepted for drafted, accepted in out.rounds[0])


def test_ids_that_cannot_be_served_are_refused() -> None:
    for ids, message in (
        ([3, 2], "ascending order, each once"), ([2, 2], "ascending"), ([], "ascending"), ([[2, 3]], "ascending"), ([0.5], "ascending"),
        ([-1, 2], r"-1\.\.2; the ids that can be said are 0\.\.60"), ([2, 61], r"0\.\.60"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ModelDrafter(TARGET, ids=torch.tensor(ids))
    with pytest.raises(ValueError, match=r"0\.\.49"):
        ModelDrafter(TARGET, vocab_size=50, ids=IDS)
    wrapped = noisy(TARGET)
    wrapped.forward = wrapped.forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="trim it before"):
        ModelDrafter(wrapped, ids=IDS)


def test_the_ids_are_read_from_the_folder_of_the_draft(tmp_path: Path) -> None:
    target, tokenizer = load(tiny_folder(tmp_path / "target"))
    draft = tmp_path / "draft"
    tiny_folder(draft, seed=4)
    described, ids = draft / "drafter.json", draft / "draft_ids.json"
    described.write_text(json.dumps({"kind": "model", "settings": {"ids": ids.name}}))
    with pytest.raises(FileNotFoundError, match=r"draft_ids\.json does not exist, and the drafter\.json beside it names it"):
        load_drafter(draft, target, tokenizer)
    for text, message in {
        "[1, 2": "is not JSON", "{}": "must hold a list of ids", "[1, 2.5]": "must hold a list", "[true]": "must hold a list",
        "[5, 3]": r"the ids of .*draft_ids\.json must be", "[5, 260]": r"draft_ids\.json are 5\.\.260; .* 0\.\.259", "[]": "ascending",
    }.items():  # fmt: skip
        ids.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_drafter(draft, target, tokenizer)
    ids.write_text("[2, 40, 77, 200]")
    assert load_drafter(draft, target, tokenizer).ids == 4  # type: ignore[attr-defined]
    described.write_text(json.dumps({"kind": "combined", "settings": {"min_match": 2, "model": {"ids": ids.name}}}))
    both = load_drafter(draft, target, tokenizer)
    assert both.ids == 4  # type: ignore[attr-defined]
    prompt = tokenizer("the").input_ids
    assert generate(target, [prompt], both, max_new_tokens=20).tokens == [plain_greedy(target, prompt, 20)]


def test_ids_that_only_pad_a_head_are_no_ids_of_a_draft(tmp_path: Path) -> None:
    target, tokenizer = load(tiny_folder(tmp_path / "target"))
    tiny_folder(tmp_path / "draft", seed=4)
    from draftsmith.specdec.places import quiet

    wide = tiny("llama", 4, vocab_size=300, max_position_embeddings=2048)
    with quiet():
        wide.save_pretrained(tmp_path / "draft")
    (tmp_path / "draft" / "drafter.json").write_text('{"kind": "model", "settings": {"ids": "draft_ids.json"}}')
    (tmp_path / "draft" / "draft_ids.json").write_text("[2, 280]")
    with pytest.raises(ValueError, match=r"0\.\.259"):
        load_drafter(tmp_path / "draft", target, tokenizer)


def test_the_head_of_a_prepared_draft_is_prepared_too() -> None:
    model = prepare_for_decoding(noisy(TARGET))
    head: Any = ModelDrafter(model, ids=IDS).model.get_output_embeddings()
    assert type(head) is type(model.get_output_embeddings()) is not torch.nn.Linear
    assert head.weight.shape == (len(IDS), 32)
