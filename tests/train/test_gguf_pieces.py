"""A sentencepiece tokenizer in a .gguf: scores that merge as the merges did, by llama.cpp's own rule and by transformers' reader."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from gguf import TokenType
from tokenizers import normalizers, pre_tokenizers

from draftsmith.recipes.checksums import write_sums
from draftsmith.specdec.places import gguf_tokenizer, quiet
from draftsmith.train.export import EXPORTS, proof, prove_gguf
from draftsmith.train.export.gguf_file import read_metadata, write_gguf
from draftsmith.train.export.gguf_tokenizer import Vocabulary, vocabulary
from finished import a_run, with_export
from pieces import TEXTS, pieces_tokenizer
from tiny import tiny, uneven

TOKENIZER = pieces_tokenizer()
ROWS = len(TOKENIZER) + 3


def by_score(words: Vocabulary, text: str) -> list[int]:
    """llama.cpp's rule (src/llama-vocab.cpp, llm_tokenizer_spm) for a text without special tokens, as a plain loop: of all neighbours that
    spell a token, merge those with the highest score, the leftmost of equals; what is no token then is written as bytes."""
    said = {one.key: one.value for one in words.entries}
    ids = {token: i for i, token in enumerate(said["tokenizer.ggml.tokens"])}
    scores = said["tokenizer.ggml.scores"]
    parts = list(((" " if said["tokenizer.ggml.add_space_prefix"] else "") + text).replace(" ", "▁"))
    while found := [
        (scores[ids[left + right]], -at) for at, (left, right) in enumerate(itertools.pairwise(parts)) if left + right in ids
    ]:
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for one in parts for i in ([ids[one]] if one in ids else [ids[f"<0x{byte:02X}>"] for byte in one.encode()])]


def test_scores_merge_as_the_merges_did(tmp_path: Path) -> None:
    words = vocabulary(TOKENIZER, ROWS)
    assert words.notes == []
    for text in TEXTS[:-1]:
        assert [1, *by_score(words, text)] == TOKENIZER(text).input_ids, text
    write_gguf(tmp_path / "m.gguf", uneven("llama", vocab_size=ROWS), words, "f32")
    found = read_metadata(tmp_path / "m.gguf")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"], found["tokenizer.ggml.add_bos_token"]) == (
        "llama",
        "default",
        True,
    )
    types = found["tokenizer.ggml.token_type"]
    assert types[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert types[258:260] == [TokenType.BYTE, TokenType.NORMAL]
    assert types[-3:] == [TokenType.UNUSED] * 3
    with quiet():
        back = gguf_tokenizer(tmp_path / "m.gguf")
    assert all(back.convert_tokens_to_ids(token) == i for token, i in TOKENIZER.get_vocab().items())
    assert (back.bos_token_id, back.eos_token_id, back.unk_token_id) == (1, 2, 0)


def test_a_run_with_such_a_target_is_exported_and_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "in_a_fresh_process", lambda which, *words: json.loads(json.dumps(prove_gguf.prove(*words))))
    recipe = with_export(a_run(tmp_path, vocab_size=len(TOKENIZER)), quantization="f32")
    with quiet():
        tiny("llama", vocab_size=len(TOKENIZER)).save_pretrained(recipe.target.model)
    for place in (recipe.target.model, recipe.folder / "step-4" / "draft"):
        TOKENIZER.save_pretrained(place)
    write_sums(recipe.folder / "step-4")
    found = read_metadata(EXPORTS["gguf"](recipe, False) / "draft.gguf")
    assert (found["tokenizer.ggml.model"], len(found["tokenizer.ggml.scores"])) == ("llama", len(TOKENIZER))


@pytest.mark.parametrize(("scheme", "prefix", "notes"), [("always", True, 1), ("first", True, 2), ("never", False, 0)])
def test_where_a_space_is_put_before_a_text_is_kept_or_said(scheme: str, prefix: bool, notes: int) -> None:
    tokenizer = pieces_tokenizer(scheme)
    words = vocabulary(tokenizer, ROWS)
    assert {one.key: one.value for one in words.entries}["tokenizer.ggml.add_space_prefix"] is prefix
    assert len(words.notes) == notes
    assert [1, *by_score(words, "the quick")] == tokenizer("the quick").input_ids
    same = [1, *by_score(words, " the")] == tokenizer(" the").input_ids
    assert same == (not prefix)  # the last of the notes


def test_merges_that_no_score_could_say_are_refused() -> None:
    with pytest.raises(ValueError, match=r"never merges .* is a token; llama\.cpp would"):
        vocabulary(pieces_tokenizer(drop=1), ROWS)
    apart = pieces_tokenizer()
    model = apart.backend_tokenizer.model
    state = json.loads(model.__getstate__())
    merges = [tuple(one) for one in state["merges"]]
    of_aba = [one for one in merges if "".join(one) == "aba"]
    assert len(of_aba) == 2
    merges.remove(of_aba[0])
    apart.backend_tokenizer.model = type(model)(
        vocab=state["vocab"], merges=[*merges, of_aba[0]], unk_token="<unk>", byte_fallback=True
    )
    with pytest.raises(ValueError, match=r"make .* at places apart, which no score could say"):
        vocabulary(apart, ROWS)


def test_what_is_done_to_a_text_beside_spaces_is_refused() -> None:
    lower = pieces_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")])
    with pytest.raises(ValueError, match=r"Lowercase.* does nothing else to it"):
        vocabulary(lower, ROWS)
    split = pieces_tokenizer("first")
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    with pytest.raises(ValueError, match="splits it by"):
        vocabulary(split, ROWS)
