"""`draftsmith plan`: the sentence on top, the tables, the json, and errors that say what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig

from draftsmith.cli import main
from draftsmith.eval.plan import Asked, plan
from draftsmith.eval.plan.devices import device_named
from draftsmith.eval.plan.run import parse_alpha
from llamas import save_llamas
from runs import inside

ROOT = Path(__file__).parent.parent.parent
EIGHT = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.fixture
def target(tmp_path: Path) -> str:
    LlamaConfig(**EIGHT, num_hidden_layers=32, max_position_embeddings=65536, dtype="bfloat16").save_pretrained(tmp_path / "8B")
    return str(tmp_path / "8B")


def test_the_sentence_and_the_tables(target: str) -> None:
    done = inside("plan", "--target", target, "--draft", "layers:2", "--device", "h200", "--alpha", "0.7", "--context", "512")
    assert done.returncode == 0, done.stderr
    sentence = done.stdout.splitlines()[0]
    assert sentence.startswith("Speculate at acceptance 0.7 and context 512: 1.")
    assert "; do not speculate above batch " in sentence
    for word in (
        "8,030,261,248",
        "131.07 kB",
        "h200 has",
        "k = 4",
        "Speed-up at acceptance 0.7",
        "for 1.5x",
        "ZeRO-3",
        "bf16, sharded",
    ):
        assert word in done.stdout, word
    assert "\x1b" not in done.stdout


def test_the_json_says_the_same(target: str, tmp_path: Path) -> None:
    words = (
        "plan",
        "--target",
        target + "/config.json",
        "--draft",
        "layers:2",
        "--device",
        "h200",
        "--alpha",
        "0.7",
        "--context",
        "512",
        "--json",
    )
    done = inside(*words)
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert found["target"]["parameters"] == 8_030_261_248
    ((_, last),) = found["by_alpha"][0]["pays"]["512"]
    assert found["verdict"].endswith(f"do not speculate above batch {last}.")
    rows = found["speed_up"]["512"]
    assert all((one["speed_up"] > 1) == (int(batch) <= last) for batch, one in rows.items())
    assert found["times"]["verify"] > found["times"]["plain"] > found["times"]["step"] > 0


def of(target: str, **changes: Any) -> dict[str, Any]:
    return plan(Asked(**{"target": target, "draft": "layers:2", "device": "dgx-spark", **changes}))


def test_the_verdicts(target: str) -> None:
    big = of(target, dtype="fp32", batch=256, context=32768)["verdict"]
    assert big.startswith("Does not fit: batch 256 at context 32768 needs ")
    assert "the longest context for that batch is " in big
    none = of(target, device="rtx4090", dtype="fp32")["verdict"]
    assert "not even one token fits beside the weights: take fewer bits" in none
    never = of(target, draft="cost:1.1")["verdict"]
    assert never.startswith("Do not speculate at acceptance 0.7 and context 4096: the best block takes 1.")
    assert never.endswith(" times as long as plain decoding at batch 1; no acceptance would do.")
    assert "it would need an acceptance of 0.5" in of(target, draft="cost:0.5", alpha=("0.3",))["verdict"]
    slow = of(target, draft="layers:3", device="h200", alpha=("0.45",), context=32768)["verdict"]
    assert re.search(r"it would need an acceptance of 0\.\d\d or a batch of \d+\.$", slow), slow
    assert of(target, draft="cost:0.65", alpha=("0.8",))["verdict"].startswith("Too close to call")
    assert "it pays up to the largest batch that fits, " in of(target, alpha=("0.8",))["verdict"]
    assert "it pays up to batch 1024 at least" in of(target, alpha=("0.95",), context=16, draft="ngram")["verdict"]


def test_one_k_and_an_acceptance_by_position(target: str) -> None:
    found = of(target, k=3, alpha=("0.8,0.5", "0.9"), batch=3)
    assert found["alpha"] == (0.9,)
    assert {one["k"] for rows in found["speed_up"].values() for one in rows.values()} == {3}
    assert 3 in found["speed_up"][512]
    assert found["serving"]["k"] == found["times"]["k"] == 3
    assert parse_alpha("0.8,0.5") == (0.8, 0.5)


def test_a_context_is_one_that_the_target_serves(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=2048
    ).save_pretrained(tmp_path)
    found = of(str(tmp_path))
    assert found["asked"]["context"] == 2048
    assert list(found["speed_up"]) == [512, 2048]


def test_a_trimmed_head_and_fewer_bits_make_a_step_cheaper(target: str) -> None:
    whole, cut, small = (of(target, **one) for one in ({}, {"draft_vocabulary": 16384}, {"draft_dtype": "int4"}))
    assert cut["times"]["step"] < whole["times"]["step"]
    assert small["times"]["step"] < whole["times"]["step"]
    assert whole["draft"]["head"] == 8 * cut["draft"]["head"] * 0.978515625  # 128,256 rows, 16,384 rows


def test_what_a_reader_must_know_is_noted(target: str, tmp_path: Path) -> None:
    LlamaConfig(**EIGHT | {"vocab_size": 32000}, num_hidden_layers=1, max_position_embeddings=2048).save_pretrained(tmp_path / "d")
    said = of(target, draft=str(tmp_path / "d"))["notes"]
    assert "the draft serves 2048 positions, less than the 4096 asked: beyond them the target goes on alone" in said
    assert any("the draft embeds 32000 ids, the target 128256: hardly one tokenizer" in one for one in said)
    wide = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    Gemma3TextConfig(**wide, head_dim=8, sliding_window=16).save_pretrained(tmp_path / "gemma")
    (window,) = of(str(tmp_path / "gemma"), batch=2)["notes"]
    assert "look back 16 tokens only: Draftsmith's own decoder serves one sequence at a time" in window
    assert of(str(tmp_path / "gemma"), batch=1)["notes"] == []
    MixtralConfig(**wide, num_local_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path / "moe")
    assert any("experts are taken to be hit at random" in one for one in of(str(tmp_path / "moe"))["notes"])


def test_a_device_of_the_users_own(target: str, tmp_path: Path) -> None:
    mine = {"memory_gb": 48, "system_gb": 1, "bandwidth_gbs": 864, "tflops": {"bf16": 181}}
    file = tmp_path / "l40s.yaml"
    file.write_text(yaml.safe_dump(mine))
    assert of(target, device=str(file))["serving"]["has"] == 48e9
    file.write_text(yaml.safe_dump({**mine, "bandwith_gbs": 1}))
    with pytest.raises(ValueError, match=r"device .*: bandwith_gbs: extra inputs are not permitted; did you mean bandwidth_gbs\?"):
        device_named(str(file))
    file.write_text(yaml.safe_dump({**mine, "tflops": {"fp64": 1}}))
    with pytest.raises(ValueError, match="the device's tflops hold fp64; give one of bf16, fp16, fp32"):
        of(target, device=str(file))
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match=r"a device is a mapping .*found list"):
        device_named(str(file))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        device_named(str(tmp_path / "gone.yaml"))


def test_errors_are_one_line_with_what_to_do(target: str, tmp_path: Path) -> None:
    for changes, wanted in {
        ("device", "h20"): "'h20' is not one of .*; did you mean 'h200'",
        ("engine", "server"): "did you mean 'served'",
        ("dtype", "fp9"): "'fp9' is not one of bf16",
        ("context", 100_000): "serves 65536 positions: give a smaller --context",
        ("batch", 0): "batch 0 asked; it is at least 1",
        ("alpha", ("1.5",)): "alpha '1.5': an acceptance is a number from 0 to 1",
        ("alpha", ("a,b",)): "alpha 'a,b': an acceptance",
    }.items():
        with pytest.raises(ValueError, match=wanted):
            of(target, **dict([changes]))
    config = Path(target) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    done = inside("plan", "--target", target, "--draft", "ngram", "--device", "h200")
    assert done.returncode == 2
    assert "is quantised; say as what its weights are to be counted: --dtype fp8" in done.stderr
    assert "Traceback" not in done.stderr
    assert of(target, dtype="fp8")["target"]["bytes"] == 6_979_584_000 + 2 * (8_030_261_248 - 6_979_584_000)


def test_the_page_quotes_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save_llamas(tmp_path)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\$ draftsmith (plan .*)\n(.*)$", page, re.MULTILINE)
    assert len(quoted) == 10
    for place, (command, sentence) in enumerate(quoted):
        assert main(command.split()) == 0
        printed = capsys.readouterr().out
        assert printed.splitlines()[0] == sentence, command
        assert place or printed.rstrip() in page, "the first is quoted with all its tables"
