"""A donor of another tokenizer speaks the target's ids: whose rows each id has, and that the result decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.distill.draft import Origin, save_draft
from draftsmith.distill.making.transplant import KINDS, Transplanted, transplant
from draftsmith.specdec import ModelDrafter, compatible, generate, load_drafter
from tiny import plain_greedy, tiny
from vocabularies import byte_level, sentencepiece

DONOR = byte_level(
    ["t h", "th e", "Ġ the", "i n"], {"bos_token": "<|start|>", "eos_token": "<|stop|>", "pad_token": "<pad>"}, (), None
)
TARGET = byte_level(["h e", "t he", "t h", "Ġ th", "i n", "in g"])
PIECES = sentencepiece(["t h", "th e", "▁ the", "i n"])


def model(tokenizer: Any, family: str = "llama", **changes: Any) -> Any:
    return tiny(family, 5, vocab_size=len(tokenizer), **changes)


def rows(one: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return one.get_input_embeddings().weight.detach(), one.get_output_embeddings().weight.detach()


def kind_of(made: Transplanted, i: int) -> str:
    return KINDS[int(made.report.kinds[i])]


@pytest.mark.parametrize("tied", [False, True])
def test_whose_rows_each_id_has(tied: bool) -> None:
    donor = tiny("llama", 5, vocab_size=len(DONOR) + 4, tie_word_embeddings=tied)
    with torch.no_grad():
        for weight in (donor.get_input_embeddings().weight, donor.get_output_embeddings().weight):
            weight[len(DONOR) :] = 50.0  # rows that only pad it are no part of any mean
    made = transplant(donor, DONOR, TARGET, len(TARGET) + 3)
    ours, theirs = TARGET.get_vocab(), DONOR.get_vocab()
    (read, said), (was_read, was_said) = rows(made.model), rows(donor)
    for name in ("t", "Ġ", "Ċ", "th", "the", "in", "<note>"):
        assert kind_of(made, ours[name]) == "exact", name
        assert torch.equal(read[ours[name]], was_read[theirs[name]])
        assert torch.equal(said[ours[name]], was_said[theirs[name]])
    assert kind_of(made, ours["he"]) == "composed"
    parts = [theirs["h"], theirs["e"]]
    assert torch.allclose(read[ours["he"]], was_read[parts].mean(0), atol=1e-6)
    weights = torch.tensor([0.5, 0.5] if tied else [2 / 3, 1 / 3])
    assert torch.allclose(said[ours["he"]], weights @ was_said[parts], atol=1e-6), "the first of them is what the donor says now"
    assert kind_of(made, ours["ing"]) == "composed"
    for name, role in {"<bos>": "<|start|>", "<end>": "<|stop|>"}.items():
        assert kind_of(made, ours[name]) == "role"
        assert torch.equal(read[ours[name]], was_read[theirs[role]])
    assert kind_of(made, ours["<pad>"]) == "exact"
    mean = was_read[: len(DONOR)].mean(0)
    for i in (ours["<tool>"], len(TARGET), len(TARGET) + 2):
        assert kind_of(made, i) == ("unknown" if i < len(TARGET) else "padding")
        assert torch.allclose(read[i], mean, atol=1e-6)
    counts = made.report[:-1]
    assert sum(counts) == len(TARGET) + 3 == len(made.report.kinds)
    assert (made.report.role, made.report.unknown, made.report.padding) == (2, 1, 3)
    assert str(made.report).endswith("2 role, 1 unknown, 3 padding")
    assert made.report.known([([0, ours["the"], ours["he"], ours["<end>"], ours["t"]], 1)]) == 0.75
    assert (made.model.lm_head.weight is made.model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3"])
@pytest.mark.parametrize("donor_first", [True, False])
def test_a_text_of_exact_tokens_is_read_as_the_donor_reads_it(family: str, donor_first: bool) -> None:
    """Byte-level to sentencepiece and back: the logits of ids that both have are the donor's own, to the bit."""
    theirs, ours = (DONOR, PIECES) if donor_first else (PIECES, DONOR)
    donor = model(theirs, family)
    made = transplant(donor, theirs, ours, len(ours)).model
    pairs = [("Ġ", "▁"), ("the", "the"), ("Ġthe", "▁the"), ("t", "t"), ("in", "in"), ("Ċ", "<0x0A>"), (".", ".")]
    there = theirs.convert_tokens_to_ids([one[not donor_first] for one in pairs])
    here = ours.convert_tokens_to_ids([one[donor_first] for one in pairs])
    with torch.no_grad():
        wanted = donor(input_ids=torch.tensor([there])).logits[..., there]
        found = made(input_ids=torch.tensor([here])).logits[..., here]
    assert torch.allclose(found, wanted, atol=1e-5)


def test_raw_bytes_and_letters_that_only_one_side_has() -> None:
    made = transplant(model(DONOR), DONOR, PIECES, len(PIECES))
    letters = PIECES.get_vocab()
    assert kind_of(made, letters["<0xC3>"]) == "exact", "a byte is a letter of GPT-2's alphabet"
    assert kind_of(made, letters["é"]) == "composed"
    assert made.report.unknown == 1, "<unk>"
    back = transplant(model(PIECES), PIECES, DONOR, len(DONOR))
    ids = DONOR.get_vocab()
    (read, _), (was_read, _) = rows(back.model), rows(model(PIECES))
    assert torch.equal(read[ids["a"]], was_read[letters["a"]]), "the letter's own row, not that of its byte"
    assert torch.equal(read[ids["Ã"]], was_read[letters["<0xC3>"]])
    same = transplant(model(PIECES), PIECES, PIECES, len(PIECES))
    assert torch.equal(rows(same.model)[0], was_read), "one vocabulary onto itself changes nothing"
    assert same.report.exact == len(PIECES)


def test_what_the_caller_tells_comes_first() -> None:
    made = transplant(model(DONOR), DONOR, TARGET, len(TARGET), told={"<tool>": "the"})
    ours, theirs = TARGET.get_vocab(), DONOR.get_vocab()
    assert kind_of(made, ours["<tool>"]) == "told"
    assert torch.equal(rows(made.model)[0][ours["<tool>"]], rows(model(DONOR))[0][theirs["the"]])
    for settings, message in (
        ({"told": {"<tol>": "the"}}, "'<tol>', which is no token of the target"),
        ({"tied": True}, "one of its two matrices would be lost"),
    ):
        with pytest.raises(ValueError, match=message):
            transplant(model(DONOR), DONOR, TARGET, len(TARGET), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ids up to"):
        transplant(model(DONOR), DONOR, TARGET, 100)


def test_a_tied_donor_can_get_a_head_of_its_own() -> None:
    donor = model(DONOR, tie_word_embeddings=True)
    made = transplant(donor, DONOR, TARGET, len(TARGET), tied=False).model
    he = TARGET.get_vocab()["he"]
    read, said = rows(made)
    assert not torch.equal(read[he], said[he])
    assert not made.config.tie_word_embeddings


def test_the_result_drafts_for_the_target_and_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    target = tiny(vocab_size=len(TARGET), seed=3)
    made = transplant(model(DONOR), DONOR, TARGET, len(TARGET))
    save_draft(made.model, tmp_path, Origin("target", "r", TARGET))
    assert compatible(TARGET, AutoTokenizer.from_pretrained(tmp_path)).problem is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), made.model.state_dict().values(), strict=True))
    assert (again.config.eos_token_id, again.config.bos_token_id) == (TARGET.eos_token_id, TARGET.bos_token_id)
    drafter = load_drafter(tmp_path, target, TARGET)
    assert isinstance(drafter, ModelDrafter)
    prompts = [TARGET("the thing").input_ids, TARGET("x").input_ids]
    assert generate(target, prompts, drafter, max_new_tokens=20).tokens == [plain_greedy(target, prompt, 20) for prompt in prompts]
