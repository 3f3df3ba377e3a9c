"""Two vocabularies side by side, and the engines that take the pair: each condition of each engine is met and broken once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from test_models import READS_GGUF, write_gguf

from draftsmith.specdec.compat import compat
from draftsmith.specdec.compat_engines import ENGINES
from tiny import tiny_folder, tiny_tokenizer
from vocabularies import byte_level, sentencepiece


def folder(place: Path, tokenizer: Any = None, rows: int | None = None, **config: Any) -> str:
    """A tokenizer and a config.json, and no weights at all."""
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.save_pretrained(place)
    about = {"model_type": "llama", "vocab_size": rows or max(tokenizer.get_vocab().values()) + 1, "max_position_embeddings": 2048}
    (place / "config.json").write_text(json.dumps(about | config))
    return str(place)


def takes(target: str, draft: str) -> dict[str, str]:
    pair = compat(target, draft)
    return {name: judge(pair).takes for name, judge in ENGINES.items()}


def why(target: str, draft: str, engine: str) -> str:
    return ENGINES[engine](compat(target, draft)).why


def test_one_vocabulary_is_taken_by_all(tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "t"), folder(tmp_path / "d", max_position_embeddings=512)
    pair = compat(target, draft)
    assert (pair.identical, pair.moved, pair.missing, pair.added, pair.differences) == (260, 0, 0, 0, [])
    assert (pair.target.positions, pair.draft.positions) == (2048, 512)
    assert pair.target.specials["end of turn"] == (2, "</s>")
    assert pair.problem is None
    assert set(takes(target, draft).values()) == {"yes"}


def test_one_tokenizer_padded_two_ways_is_taken_by_some(tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "t", rows=300), folder(tmp_path / "d", rows=264)
    pair = compat(target, draft)
    assert (pair.target.padding, pair.draft.padding) == (40, 4)
    assert list(takes(target, draft).values()) == ["yes", "with", "with", "no", "yes"]
    assert "300 and 264" in why(target, draft, "SGLang STANDALONE")
    assert "more than 128" in why(folder(tmp_path / "far", rows=400), draft, "llama.cpp")


def test_two_swapped_ids_are_another_language_whatever_the_sizes_say(tmp_path: Path) -> None:
    target, draft = folder(tmp_path / "t"), folder(tmp_path / "d", tiny_tokenizer(swapped=(100, 101)))
    pair = compat(target, draft)
    assert (pair.identical, pair.moved, pair.missing) == (258, 2, 0)
    assert [one.id for one in pair.differences] == [100, 101]
    assert pair.differences[0].target == pair.differences[1].draft
    assert list(takes(target, draft).values()) == ["no", "with", "no", "no", "no"]
    assert "token 100 differs" in why(target, draft, "llama.cpp")
    low = folder(tmp_path / "low", tiny_tokenizer(swapped=(3, 4)))
    assert takes(target, low)["llama.cpp"] == "with", "it looks from id 5 on only"


def test_a_draft_with_fewer_tokens_is_seen_to_abort(tmp_path: Path) -> None:
    merges = ["t h", "h e"]
    target, draft = folder(tmp_path / "t", byte_level(merges)), folder(tmp_path / "d", byte_level(merges[:1]))
    pair = compat(target, draft)
    assert (pair.moved, pair.missing) == (1, 1), "<note> moved"
    assert "token 261 differs" in why(target, draft, "llama.cpp")
    shorter = byte_level([])
    fewer = folder(tmp_path / "f", tiny_tokenizer(), rows=250)  # its head has not a row for every token
    assert takes(folder(tmp_path / "w"), fewer)["llama.cpp"] == "with"
    assert "aborts at the target's first token beyond 249" in why(folder(tmp_path / "w"), fewer, "llama.cpp")
    assert compat(target, folder(tmp_path / "s", shorter)).added == 0


def test_other_kinds_of_tokenizers_and_other_ends(tmp_path: Path) -> None:
    target, pieces = folder(tmp_path / "t"), folder(tmp_path / "p", sentencepiece(["t h"]))
    assert why(target, pieces, "llama.cpp") == "the vocabularies are of two types, BPE and SPM"
    assert takes(target, pieces)["transformers assistant_model"] == "with"
    bare = sentencepiece(["t h"])
    bare.backend_tokenizer.post_processor = None
    assert "the target adds id 1 as BOS" in why(pieces, folder(tmp_path / "b", bare), "llama.cpp")
    ends = tiny_tokenizer()
    ends.eos_token = "<s>"
    pair = compat(target, folder(tmp_path / "e", ends))
    assert pair.same_ids
    assert "ends its text with id 1" in str(pair.problem)


@READS_GGUF
def test_of_a_gguf_its_head_is_read_and_nothing_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_folder(tmp_path / "plain")
    write_gguf(tmp_path / "plain", tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    pair = compat(plain, tmp_path / "tiny.gguf")
    assert pair.problem is None
    assert pair.draft.rows == 260
    assert not (tmp_path / "cache").exists()
