"""A .gguf that we write: read back by the gguf package and by transformers' own loader, which share no code with the writer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from draftsmith.specdec.places import BY_DIGIT, gguf_tokenizer, quiet
from draftsmith.train.export.gguf_file import FORMS, read_metadata, read_tensors, write_gguf
from draftsmith.train.export.gguf_tokenizer import copied, split_name, vocabulary
from tiny import tiny_tokenizer, uneven

TOKENIZER = tiny_tokenizer()
ROWS = len(TOKENIZER) + 4  # the last four pad the head
model = partial(uneven, vocab_size=ROWS)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def words(**said: Any) -> Any:
    return vocabulary(TOKENIZER, ROWS, split="gpt-2", **said)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),  # the only width that transformers' loader knows
    ],
)
def test_transformers_own_loader_finds_every_weight(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made = model(family, **changes)
    write_gguf(tmp_path / "m.gguf", made, words(), "f32")
    with quiet():
        back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    theirs = back.state_dict()
    assert made.state_dict().keys() == theirs.keys()
    for name, value in made.state_dict().items():
        assert torch.equal(value, theirs[name]), name
    tied = bool(changes.get("tie_word_embeddings"))
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
    assert ("output.weight" not in dict(read_tensors(tmp_path / "m.gguf"))) == tied
    ids = torch.arange(3, 40)[None]
    if family != "qwen3":  # whose head_dim transformers reads from nowhere
        assert back.config.rope_parameters["rope_theta"] == made.config.rope_parameters["rope_theta"]
    assert torch.equal(made(ids).logits, back(ids).logits)


def test_the_metadata_says_what_the_config_says(tmp_path: Path) -> None:
    changes = {
        "rms_norm_eps": 3e-5,
        "max_position_embeddings": 99,
        "head_dim": 16,
        "rope_parameters": {**LLAMA3, "rope_theta": 5e5},
    }
    made = model(**changes)
    write_gguf(tmp_path / "m.gguf", made, words(), "f32", {"name": "a draft", "license": "apache-2.0"})
    found = read_metadata(tmp_path / "m.gguf")
    wanted = {
        "general.architecture": "llama", "general.name": "a draft", "general.license": "apache-2.0", "general.file_type": 0,
        "llama.vocab_size": ROWS, "llama.context_length": 99, "llama.embedding_length": 32, "llama.block_count": 3, "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 16,
        "llama.attention.key_length": 16, "llama.attention.value_length": 16, "llama.rope.freq_base": 5e5,
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(3e-5)
    factors = dict(read_tensors(tmp_path / "m.gguf"))["rope_freqs.weight"].values
    assert factors[0] == 1
    assert factors[-1] == 8  # fast turns stay, slow ones are stretched by the whole factor
    assert torch.allclose(factors, (5e5 ** (-torch.arange(0, 16, 2) / 16)) / made.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_kept_in_the_kinds_it_names(form: str, tmp_path: Path) -> None:
    made = model(tie_word_embeddings=False)
    written = write_gguf(tmp_path / "m.gguf", made, words(), form)
    found = dict(read_tensors(tmp_path / "m.gguf"))
    kinds = {name: one.kind for name, one in found.items()}
    assert written.tensors == len(found)
    assert {kind for name, kind in kinds.items() if "norm" in name} == {GGMLQuantizationType.F32}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == FORMS[form].ends
    assert kinds["blk.1.ffn_up.weight"] == FORMS[form].blocks
    # 48 is no multiple of a block of 32, and the one matrix with such rows is said to be kept otherwise.
    spared = [f"blk.{i}.ffn_down.weight" for i in range(3)] if form in ("q8_0", "q4_0") else []
    assert written.spared == spared
    assert all(kinds[name] == GGMLQuantizationType.F16 for name in spared)
    source = made.model.layers[1].mlp.up_proj.weight
    worst = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127, "q4_0": 1 / 7}[form]
    assert (found["blk.1.ffn_up.weight"].values - source).abs().max() <= worst * source.abs().max()


def test_the_tokenizer_comes_back(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model(), words(), "f32")
    with quiet():
        back = gguf_tokenizer(tmp_path / "m.gguf")
    assert {token: i for token, i in back.get_vocab().items() if i < len(TOKENIZER)} == TOKENIZER.get_vocab()
    assert (back.bos_token_id, back.eos_token_id, back.pad_token_id, back.unk_token_id) == (1, 2, 2, 0)
    assert back.chat_template == TOKENIZER.chat_template
    text = "the <s>path</s> 日本"
    assert back(text).input_ids == TOKENIZER(text).input_ids
    found = read_metadata(tmp_path / "m.gguf")
    assert found["tokenizer.ggml.merges"] == ["t h"]
    types = found["tokenizer.ggml.token_type"]
    assert types[:4] == [TokenType.CONTROL] * 3 + [TokenType.NORMAL]
    assert types[-4:] == [TokenType.UNUSED] * 4
    assert found["tokenizer.ggml.tokens"][-1] == f"[PAD{ROWS - 1}]"
    assert found["tokenizer.ggml.eot_token_id"] == 2  # what closes a turn in the template


@pytest.mark.parametrize(("split", "found"), [("gpt-2", ["a", "Ġ", "Ġ12"]), *((one, ["a", "ĠĠ", "1", "2"]) for one in BY_DIGIT)])
def test_a_tokenizer_splits_into_words_as_its_file_says(split: str, found: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model(), vocabulary(TOKENIZER, ROWS, split=split), "f32")
    with quiet():
        back = gguf_tokenizer(tmp_path / "m.gguf")
    assert [word for word, _ in back.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")] == found


def test_whether_a_bos_is_added_is_always_said() -> None:
    # "llama-bpe" alone makes llama.cpp add one.
    said = {one.key: one.value for one in words().entries}
    assert said["tokenizer.ggml.add_bos_token"] is False
    adding = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    said = {one.key: one.value for one in vocabulary(adding, ROWS, split="gpt-2").entries}
    assert said["tokenizer.ggml.add_bos_token"] is True
    assert said["tokenizer.ggml.add_eos_token"] is False


def test_a_tokenizer_without_a_bos_gets_the_models() -> None:
    # llama.cpp takes id 11 where none is said.
    bare = tiny_tokenizer()
    bare.bos_token = None
    assert {one.key: one.value for one in vocabulary(bare, ROWS, bos=7, split="gpt-2").entries}["tokenizer.ggml.bos_token_id"] == 7


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("first", "whole_words", "name"),
    [
        ({**BYTES, "use_regex": True}, False, "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}], False, "smollm"),
        ([{**SPLIT, "pattern": {"Regex": PRETOKENIZE_REGEX}}, BYTES], False, "qwen2"),
        ([{**SPLIT, "pattern": {"Regex": LLAMA}}, BYTES], True, "llama-bpe"),
        ([{**SPLIT, "pattern": {"Regex": LLAMA}}, BYTES], False, "dbrx"),
    ],
)
def test_a_split_is_known_by_its_pattern(first: Any, whole_words: bool, name: str) -> None:
    split = {"type": "Sequence", "pretokenizers": first} if isinstance(first, list) else first
    whole = {"pre_tokenizer": split, "model": {"type": "BPE", "ignore_merges": whole_words}}
    assert split_name(whole) == name


def test_what_a_gguf_cannot_say_of_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"none of the splits known here .* export\.split=NAME"):
        vocabulary(TOKENIZER, ROWS)
    spaced = tiny_tokenizer()
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ValueError, match="none of the splits"):
        vocabulary(spaced, ROWS)
    with pytest.raises(ValueError, match=r"the draft has 200 rows and the tokenizer an id 259"):
        vocabulary(TOKENIZER, 200, split="gpt-2")
    lower = tiny_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="rewrites its text first"):
        vocabulary(lower, ROWS, split="gpt-2")
    pieces = tiny_tokenizer()
    pieces.backend_tokenizer.decoder = None
    pieces.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(ValueError, match=r"a sentencepiece BPE; written here are byte-level BPE"):
        vocabulary(pieces, ROWS, split="gpt-2")
    twice = tiny_tokenizer()
    twice.add_tokens([AddedToken("[PAD262]", normalized=False)])
    with pytest.raises(ValueError, match=r"ids 260 and 262 are both written '\[PAD262\]'"):
        vocabulary(twice, ROWS, split="gpt-2")


def test_where_llama_cpp_reads_otherwise_is_said() -> None:
    one = tiny_tokenizer()
    one.backend_tokenizer.normalizer = normalizers.NFC()
    one.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    one.add_tokens([AddedToken("<mask>", lstrip=True)])
    notes = vocabulary(one, ROWS).notes
    assert "NFC" in notes[0]
    assert "<mask>" in notes[1]
    assert len(notes) == 2
    assert "was named, not found out" in words().notes[0]


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gemma2", {}, "model_type.*'gemma2' is not one of"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope type llama3"),
        ("mistral", {"sliding_window": 128}, "a window of 128 of 512 positions"),
        ("qwen2", {"num_attention_heads": 2, "head_dim": 8}, "2 heads of 8 in a model 32 wide"),
        ("qwen3", {"attention_bias": True}, "biases in its attention"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
    ],
)
def test_a_model_that_llama_cpp_would_run_otherwise_is_refused(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        write_gguf(tmp_path / "m.gguf", model(family, **changes), words(), "f32")
    assert not (tmp_path / "m.gguf").exists()


def test_numbers_that_a_form_cannot_hold_are_refused(tmp_path: Path) -> None:
    made = model()
    with torch.no_grad():
        made.model.layers[2].mlp.down_proj.weight[0, 0] = 70000.0
    with pytest.raises(ValueError, match=r"blk.2.ffn_down.weight holds numbers up to 7e\+04, more than f16 can"):
        write_gguf(tmp_path / "m.gguf", made, words(), "f16")
    write_gguf(tmp_path / "m.gguf", made, words(), "bf16")
    with torch.no_grad():
        made.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        write_gguf(tmp_path / "n.gguf", made, words(), "f32")
    assert not (tmp_path / "n.gguf").exists()


def test_a_tokenizer_is_copied_from_a_gguf_entry_by_entry(tmp_path: Path) -> None:
    write_gguf(tmp_path / "target.gguf", model(), words(), "f32")
    again = copied(tmp_path / "target.gguf", ROWS)
    write_gguf(tmp_path / "draft.gguf", model(num_hidden_layers=2), again, "q8_0")
    ours, theirs = (
        {
            key: (field.contents(), field.types)
            for key, field in GGUFReader(tmp_path / name).fields.items()
            if key.startswith("tokenizer.")
        }
        for name in ("draft.gguf", "target.gguf")
    )
    assert ours == theirs
    assert json.dumps(ours["tokenizer.ggml.pre"][0]) == '"gpt-2"'
    with pytest.raises(ValueError, match=r"target.gguf has 264 tokens and the draft 260 rows"):
        copied(tmp_path / "target.gguf", 260)
