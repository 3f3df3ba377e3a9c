"""What is exported is what was trained, fits its target, and is whole or not there; what an engine would choke on is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.cli import main
from draftsmith.recipes import load_recipe
from draftsmith.recipes.checksums import write_sums
from draftsmith.specdec import load, load_drafter
from draftsmith.specdec.places import quiet
from draftsmith.train.export import EXPORTS, int8, proof, prove, prove_gguf
from draftsmith.train.export import push as push_module
from draftsmith.train.export.card import card
from draftsmith.train.export.conditions import fit
from draftsmith.train.export.gguf_file import read_metadata, read_tensors
from draftsmith.train.export.servers import splits
from finished import ROWS, a_run, with_chats, with_export
from runs import environment, inside, write_run
from tiny import tiny_tokenizer

HERE = {
    "prove": lambda *words: prove.prove(*words),
    "prove_gguf": lambda *words: prove_gguf.prove(*words),
}


@pytest.fixture(autouse=True)
def _proved_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs run in this process, as json: a fresh one imports for seconds. That it is one is tested on its own."""
    monkeypatch.setattr(proof, "in_a_fresh_process", lambda which, *words: json.loads(json.dumps(HERE[which](*words))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_draft_goes_into_both_formats_whole(family: str, tied: bool, tmp_path: Path) -> None:
    recipe = a_run(tmp_path, family, tie_word_embeddings=tied, eos_token_id=5, pad_token_id=6, bos_token_id=7)
    place = EXPORTS["transformers"](recipe, False)
    source = load_file(recipe.folder / "step-4" / "draft" / "model.safetensors")
    written = load_file(place / "model.safetensors")
    assert source.keys() == written.keys()
    assert all(torch.equal(value, written[name]) for name, value in source.items())
    assert ("lm_head.weight" in written) != tied
    # The ends are the target's, whatever the draft's checkpoint said.
    for name in ("config.json", "generation_config.json"):
        said = json.loads((place / name).read_text())
        assert (said["bos_token_id"], said["eos_token_id"], said["pad_token_id"]) == (1, 2, 2), name
    file = EXPORTS["gguf"](with_export(recipe, quantization="f32", split="gpt-2"), False) / "draft.gguf"
    names = dict(read_tensors(file))
    assert len(names) == len(source)
    assert torch.equal(names["token_embd.weight"].values, source["model.embed_tokens.weight"])
    assert read_metadata(file)["tokenizer.ggml.eos_token_id"] == 2


def test_what_does_not_fit_the_target_is_refused(tmp_path: Path) -> None:
    # llama.cpp takes a vocabulary that is a prefix of the target's, and aborts at the first token beyond it.
    with pytest.raises(ValueError, match=rf"the draft has {ROWS - 8} output rows .* and the target {ROWS}\."):
        fit(a_run(tmp_path / "rows", vocab_size=ROWS - 8))
    recipe = a_run(tmp_path / "ids")
    tiny_tokenizer(swapped=(70, 71)).save_pretrained(recipe.folder / "step-4" / "draft")
    write_sums(recipe.folder / "step-4")
    with pytest.raises(ValueError, match="id 70 is"):
        fit(recipe)
    pickled = a_run(tmp_path / "pickle")
    torch.save({}, pickled.folder / "step-4" / "draft" / "extra.bin")
    write_sums(pickled.folder / "step-4")
    with pytest.raises(ValueError, match=r"holds extra\.bin; .* pickles are never loaded"):
        fit(pickled)
    short = fit(a_run(tmp_path / "short", max_position_embeddings=64))
    assert short.notes == ["the draft reads 64 positions, the target 2048: serve the pair with at most 64"]


@pytest.mark.parametrize("format", ["transformers", "gguf"])
def test_an_export_is_whole_or_not_there_and_replaced_only_if_forced(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = with_export(a_run(tmp_path), split="gpt-2", quantization="q8_0")
    place = recipe.folder / "export" / ("transformers" if format == "transformers" else "gguf-q8_0")
    which = "prove" if format == "transformers" else "prove_gguf"

    def fails(*words: str) -> dict[str, Any]:
        assert Path(words[0]).exists()  # it is written by then
        raise RuntimeError("killed")

    with monkeypatch.context() as broken:
        broken.setitem(HERE, which, fails)
        with pytest.raises(RuntimeError, match="killed"):
            EXPORTS[format](recipe, False)
    assert list(place.parent.iterdir()) == []
    assert EXPORTS[format](recipe, False) == place
    said = capsys.readouterr().out
    assert f"exported {place}" in said
    stale = place / "stale"
    stale.touch()
    with pytest.raises(FileExistsError, match="--force replaces it"):
        EXPORTS[format](recipe, False)
    assert stale.exists()
    EXPORTS[format](recipe, True)
    assert not stale.exists()


def test_a_folder_with_a_key_too_many_or_too_few_is_not_proved(tmp_path: Path) -> None:
    recipe = a_run(tmp_path)
    place = EXPORTS["transformers"](recipe, False)
    weights = load_file(place / "model.safetensors")
    save_file({**weights, "model.extra": torch.zeros(1)}, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=r"unexpected_keys.*model\.extra"):
        prove.reload(str(place))
    weights.pop("model.norm.weight")
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=r"missing_keys.*model\.norm"):
        prove.reload(str(place))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"fingerprint": "0"}, r"finds another draft in the folder than was written \(fingerprint 0 for"),
        ({"tied": True}, r"\(tied True for False\); nothing was exported"),
        ({"equal": 1}, "with this draft only 1 of 2 greedy answers equal the target's own; nothing was exported"),
    ],
)
def test_what_a_fresh_process_finds_otherwise_is_not_exported(
    found: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_run(tmp_path)
    monkeypatch.setitem(HERE, "prove", lambda *words: {**prove.prove(*words), **found})
    with pytest.raises(RuntimeError, match=message):
        EXPORTS["transformers"](recipe, False)
    assert list((recipe.folder / "export").iterdir()) == []


def test_a_gguf_that_is_not_its_source_is_not_proved(tmp_path: Path) -> None:
    recipe = a_run(tmp_path)
    file = EXPORTS["gguf"](with_export(recipe, quantization="f32", split="gpt-2"), False) / "draft.gguf"
    source, target = str(recipe.folder / "step-4" / "draft"), recipe.target.model
    assert prove_gguf.prove(str(file), source, target, "f32")["largest"] == 0
    with pytest.raises(SystemExit, match=r"is not what was to be written"):
        prove_gguf.prove(str(file), source, target, "f16")
    weights = load_file(Path(source) / "model.safetensors")
    changed = weights["model.layers.1.self_attn.q_proj.weight"]
    before = changed.clone()
    changed[3] += 1
    save_file(weights, Path(source) / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=r"blk\.1\.attn_q\.weight is not what was to be written"):
        prove_gguf.prove(str(file), source, target, "f32")
    changed.copy_(before)
    deeper = a_run(tmp_path / "deeper", num_hidden_layers=3).folder / "step-4" / "draft"
    save_file({**load_file(deeper / "model.safetensors"), **weights}, deeper / "model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match=r"lacks blk\.2"):
        prove_gguf.prove(str(file), str(deeper), target, "f32")
    save_file(weights, Path(source) / "model.safetensors", {"format": "pt"})
    swapped = tmp_path / "swapped"
    tiny_tokenizer(swapped=(70, 71)).save_pretrained(swapped)
    (swapped / "config.json").write_text((Path(target) / "config.json").read_text())
    with pytest.raises(SystemExit, match="writes 2 tokens otherwise"):
        prove_gguf.prove(str(file), source, str(swapped), "f32")


def test_both_models_of_a_pair_get_one_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = with_export(a_run(tmp_path), models="both", split="gpt-2", quantization="q8_0")
    place = EXPORTS["gguf"](recipe, False)
    said = capsys.readouterr().out
    assert "target.gguf: 29 tensors, " not in said.replace(", 6 of them f16, for their rows are no whole blocks", "")
    draft, target = (read_metadata(place / name) for name in ("draft.gguf", "target.gguf"))
    assert {k: v for k, v in draft.items() if k.startswith("tokenizer")} == {
        k: v for k, v in target.items() if k.startswith("tokenizer")
    }
    assert (draft["llama.block_count"], target["llama.block_count"]) == (2, 3)
    script = (place / "serve.sh").read_text()
    assert 'target="$here/target.gguf"' in script
    assert "--spec-type draft-simple --spec-draft-n-max 4 -c 2048" in script
    assert "was named, not found out" in said
    # What the quantisation costs is measured like any draft: eval's candidates are loaded so.
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    loaded, tokenizer = load(recipe.target.model)
    drafter = load_drafter(place / "draft.gguf", loaded, tokenizer)
    assert 0 < (drafter.model.lm_head.weight - fit(recipe).draft.lm_head.weight).abs().max() < 0.1  # type: ignore[attr-defined]


def test_what_a_quantisation_costs_is_printed_and_in_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = with_export(a_run(tmp_path), split="gpt-2", quantization="q4_0")
    place = EXPORTS["gguf"](recipe, False)
    assert "what q4_0 costs in acceptance was not measured: " in capsys.readouterr().out
    recipe = with_chats(recipe, tmp_path)
    EXPORTS["gguf"](recipe, True)
    said = re.search(r"q4_0 costs in acceptance: sum min\(p, q\) 0\.\d{4} -> 0\.\d{4} \(change .*", capsys.readouterr().out)
    assert said
    assert f"| quantisation | {said[0]} |" in (place / "README.md").read_text()
    # The change is that of the file's numbers, and not of the draft's.
    assert "(change +0.0000" not in said[0]
    assert "(change -0.0000" not in said[0]
    EXPORTS["gguf"](with_export(recipe, quantization="f32"), False)
    assert "costs in acceptance" not in capsys.readouterr().out


def test_int8_is_refused_where_it_cannot_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_export(a_run(tmp_path), quantization="int8", split="gpt-2")
    with pytest.raises(ValueError, match=r"int8 asked of format sglang; transformers and vllm read what torchao writes"):
        EXPORTS["sglang"](recipe, False)
    with pytest.raises(ValueError, match=r"int8 asked of format gguf; .* q8_0, with format gguf"):
        EXPORTS["gguf"](recipe, False)
    monkeypatch.setattr(int8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torchao, which is not installed: pip install 'draftsmith\[int8\]'"):
        EXPORTS["transformers"](recipe, False)
    assert not (recipe.folder / "export").exists()


def test_a_run_whose_export_cannot_be_ends_before_its_training(tmp_path: Path) -> None:
    done = inside("run", write_run(tmp_path), "export.quantization=int8", "export.format=gguf")
    assert done.returncode == 2
    assert "int8 asked of format gguf" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_target_that_is_a_gguf_gives_the_draft_its_own_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    # transformers reads every such tokenizer as GPT-2's, and forgets that this one splits digits off.
    first = EXPORTS["gguf"](with_export(a_run(tmp_path / "first"), models="both", split="smollm", quantization="f32"), False)
    recipe = a_run(tmp_path / "second")
    written = tmp_path / "second" / "small.yaml"
    tree = json.loads(written.read_text())
    tree["target"]["model"] = str(first / "target.gguf")
    written.write_text(json.dumps(tree))
    recipe = load_recipe(written)
    place = EXPORTS["gguf"](recipe, False)  # no split is named: the file knows it
    ours, theirs = read_metadata(place / "draft.gguf"), read_metadata(first / "target.gguf")
    assert {k: v for k, v in ours.items() if k.startswith("tokenizer")} == {
        k: v for k, v in theirs.items() if k.startswith("tokenizer")
    }
    assert f'target="{first / "target.gguf"}"' in (place / "serve.sh").read_text()
    with pytest.raises(ValueError, match=r"models: both, but the target is a \.gguf already"):
        EXPORTS["gguf"](with_export(recipe, models="both"), True)


def test_a_server_gets_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = a_run(tmp_path, max_position_embeddings=64)
    place = EXPORTS["vllm"](recipe, False)
    asked = json.loads((place / "speculative-config.json").read_text())
    assert asked == {
        "method": "draft_model",
        "model": str(place.resolve()),
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 1,
    }
    # The script is run with a `vllm` and a `python` that print what they are given, from a folder that was moved.
    moved = place.rename(tmp_path / "moved here")
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "python"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\n')
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**environment(), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}

    def run(folder: Path) -> list[str]:
        done = subprocess.run(
            ["sh", str(folder / "serve.sh"), "--port", "1"], capture_output=True, text=True, env=env, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    words = run(moved)
    target = str((tmp_path / "target").resolve())
    assert words[:8] == ["serve", target, "--dtype", "float32", "--tensor-parallel-size", "1", "--max-model-len", "64"]
    assert json.loads(words[9]) == {**asked, "model": str(moved)}
    assert words[-2:] == ["--port", "1"]
    words = run(EXPORTS["sglang"](recipe, False))
    assert words[:4] == ["-m", "sglang.launch_server", "--model-path", target]
    said = dict(zip(words[2::2], words[3::2], strict=True))
    assert (said["--speculative-algorithm"], said["--speculative-num-steps"], said["--speculative-num-draft-tokens"]) == (
        "STANDALONE",
        "4",
        "5",
    )
    assert Path(said["--speculative-draft-model-path"]) == (recipe.folder / "export" / "sglang").resolve()
    assert said["--context-length"] == "64"
    EXPORTS["openvino"](recipe, False)
    assert f"--model {recipe.folder / 'export' / 'openvino'} " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"no stand-alone draft .* --format vllm"):
        EXPORTS["speculators"](recipe, False)


def test_a_split_over_gpus_is_checked_on_both(tmp_path: Path) -> None:
    # The target has 4 heads and 2 for keys and values, 48 MLP channels.
    recipe = a_run(tmp_path, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    config = fit(recipe).draft.config
    assert splits(config, 1) == ""
    assert splits(config, 2) == "1 attention heads do not divide by 2"
    shape = {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 48}
    assert splits(SimpleNamespace(**shape), 6) == ""  # each key-value head is copied once
    assert splits(SimpleNamespace(**shape), 4) == "3 key-value heads do not divide by 4, nor 4 by them"
    assert splits(SimpleNamespace(**{**shape, "intermediate_size": 50}), 3) == "50 MLP channels do not divide by 3"
    place = EXPORTS["vllm"](with_export(recipe, tensor_parallel=2), False)
    assert json.loads((place / "speculative-config.json").read_text())["draft_tensor_parallel_size"] == 1
    assert "--tensor-parallel-size 2" in (place / "serve.sh").read_text()
    with pytest.raises(ValueError, match="the draft cannot be split over 2 GPUs: 1 attention heads"):
        EXPORTS["sglang"](with_export(recipe, tensor_parallel=2), False)
    with pytest.raises(ValueError, match=r"the target cannot be split over 3 GPUs: 4 attention heads"):
        EXPORTS["vllm"](with_export(recipe, tensor_parallel=3), True)


def test_a_draft_too_large_for_the_targets_dtype_is_refused(tmp_path: Path) -> None:
    recipe = a_run(tmp_path)
    with quiet():
        AutoModelForCausalLM.from_pretrained(recipe.target.model).half().save_pretrained(recipe.target.model)
    weights = recipe.folder / "step-4" / "draft" / "model.safetensors"
    large = load_file(weights)
    assert "--dtype float16" in (EXPORTS["vllm"](recipe, False) / "serve.sh").read_text()
    large["model.layers.0.mlp.up_proj.weight"][0, 0] = 70000.0
    save_file(large, weights, {"format": "pt"})
    write_sums(recipe.folder / "step-4")
    with pytest.raises(
        ValueError, match=r"the target's float16, and the draft's model\.layers\.0\.mlp\.up_proj\.weight holds 7e\+04"
    ):
        EXPORTS["vllm"](recipe, True)


def test_the_proof_is_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    recipe = with_export(a_run(tmp_path), quantization="q8_0", split="gpt-2")
    place = EXPORTS["gguf"](recipe, False)
    assert (place / "draft.gguf").is_file()
    with pytest.raises(RuntimeError, match="does not load in a fresh process; nothing was exported"):
        proof.in_a_fresh_process("prove_gguf", str(place / "draft.gguf"), str(tmp_path / "none"), recipe.target.model, "q8_0")


def test_the_card_is_one_that_a_hub_reads(tmp_path: Path) -> None:
    recipe = a_run(tmp_path, max_position_embeddings=64)
    (tmp_path / "target" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n")
    page = (EXPORTS["transformers"](recipe, False) / "README.md").read_text()
    head = ModelCard(page).data
    assert (head.license, head.library_name, head.pipeline_tag) == ("apache-2.0", "transformers", "text-generation")
    assert head.base_model is None  # a folder is nothing that a hub could link to
    assert "the target's licence (apache-2.0) applies" in page
    assert "the draft reads 64 positions, the target 2048" in page.split("## Limits")[1]
    assert "learning_rate: 0.001" in page.split("## The recipe")[1]
    assert "2 of 2 greedy answers of 24 tokens equal" in page
    elsewhere = recipe.model_copy(update={"target": recipe.target.model_copy(update={"model": "some/model"})})
    assert ModelCard(card(elsewhere, "", "", [])).data.base_model == "some/model"
    (tmp_path / "target" / "README.md").unlink()
    file = EXPORTS["gguf"](with_export(recipe, split="gpt-2"), False)
    page = (file / "README.md").read_text()
    assert ModelCard(page).data.license is None
    assert "which its files do not name, applies" in page
    assert ModelCard(page).data.library_name == "gguf"
    assert "was named, not found out" in page


class Hub:
    """What `push` calls of HfApi."""

    calls: list[tuple[Any, ...]] = []  # noqa: RUF012

    def create_repo(self, repo: str, private: bool, exist_ok: bool) -> None:
        if repo == "no/token":
            answer: Any = SimpleNamespace(headers={}, request=None)
            raise HfHubHTTPError("401 Unauthorized\nmore", response=answer)
        self.calls.append(("create", repo, private, exist_ok))

    def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> str:
        self.calls.append(("upload", repo_id, sorted(one.name for one in Path(folder_path).iterdir())))
        return f"hub/{repo_id}"


def test_push_uploads_what_was_exported_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(push_module, "HfApi", Hub)
    place = EXPORTS["gguf"](with_export(a_run(tmp_path), split="gpt-2"), False)
    assert main(["push", str(place), "me/draft"]) == 0
    assert "hub/me/draft" in capsys.readouterr().out
    assert Hub.calls == [("create", "me/draft", True, True), ("upload", "me/draft", ["README.md", "draft.gguf", "serve.sh"])]
    assert main(["push", str(place), "no/token"]) == 2
    assert "401 Unauthorized. A token comes from" in capsys.readouterr().err
    (place / "optimizer.pt").touch()
    with pytest.raises(ValueError, match=r"holds optimizer\.pt"):
        push_module.push(place, "me/draft")
    with pytest.raises(ValueError, match="is no exported draft"):
        push_module.push(tmp_path, "me/draft")
