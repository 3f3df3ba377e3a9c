"""`draftsmith run` on a tiny target: every arrow of the walk leaves its file, and what is exported is what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.recipes import runs
from draftsmith.recipes.checksums import write_sums
from draftsmith.recipes.seen import prompt_hash, read_seen
from draftsmith.specdec import load, load_drafter
from draftsmith.specdec.drafters.trimmed import write_ids
from draftsmith.specdec.models import chat_ids
from runs import draftsmith, inside, write_run
from tiny import tiny_folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    done = draftsmith("run", write_run(place))
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place


def test_the_report_says_what_was_measured_and_how(finished: Path) -> None:
    run = finished / "runs" / "small"
    report = json.loads((run / "report.json").read_text())
    (part,) = report["parts"]
    assert list(part["candidates"]) == ["ngram", "untrained", "warm", "best", "both"]
    for one in part["candidates"].values():
        figures = one["all"]
        assert figures["equal"] == figures["compared"] == 4
        assert figures["new_tokens"] == figures["target_calls"] + figures["accepted"]
        assert set(one["kinds"]) == {"odd", "even"}
    how = report["how"]
    assert how["threads"] == 1
    assert how["dtype"] == "fp32"
    assert how["versions"]["transformers"]
    assert how["prepared"].startswith("prepared for decoding (")
    assert part["candidates"]["both"]["k"] == "adaptive"
    assert len(report["measurements"]) == 24  # plain decoding once more among them
    page = (run / "report.md").read_text()
    for word in (
        "tokens/call",
        "plain decoding",
        "4/4",
        "one thread" if "one thread" in page else "1 thread",
        "What the words mean",
        "**",
    ):
        assert word in page
    printed = (finished / "stdout").read_text()
    assert "tokens/call" in printed
    assert "report.md" in printed
    assert "all of it took" in printed


def test_the_export_loads_elsewhere_and_keeps_the_targets_greedy_text(finished: Path) -> None:
    place = finished / "runs" / "small" / "export" / "transformers"
    draft, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    target = AutoModelForCausalLM.from_pretrained(finished / "target")
    assert draft.get_output_embeddings().weight.shape == target.get_output_embeddings().weight.shape
    assert (draft.generation_config.eos_token_id, draft.generation_config.pad_token_id) == (2, 2)
    trained = AutoModelForCausalLM.from_pretrained(runs.find_draft(finished / "runs" / "small", "best"))
    assert all(torch.equal(a, b) for a, b in zip(draft.state_dict().values(), trained.state_dict().values(), strict=True))
    ids = torch.tensor([chat_ids(tokenizer, [{"role": "user", "content": "amber birch"}])])
    settings = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(target.generate(ids, **settings), target.generate(ids, assistant_model=draft, **settings))
    card = (place / "README.md").read_text()
    for word in (
        "logits equal bit for bit; 2 of 2",
        "held-out",
        "tokens/call",
        "target's licence",
        "revision `sha256:",
        "layers [0, 1]",
    ):
        assert word in card


def test_a_draft_of_few_ids_is_exported_with_its_whole_head_and_our_decoder_still_knows_them(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    recipe = write_run(tmp_path / "copy")
    written = tmp_path / "copy" / "runs" / "small" / "recipe.yaml"
    written.write_text(written.read_text().replace(str(finished), str(tmp_path / "copy")))
    draft = runs.find_draft(tmp_path / "copy" / "runs" / "small", "best")
    about = json.loads((draft / "drafter.json").read_text())
    ids = [0, 1, 2, *range(60, 130)]
    (draft / "drafter.json").write_text(json.dumps(about | {"settings": write_ids(draft, torch.tensor(ids))}))
    write_sums(draft.parent)
    done = inside("export", recipe, "--force")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 greedy answers equal" in done.stdout
    place = tmp_path / "copy" / "runs" / "small" / "export" / "transformers"
    assert AutoModelForCausalLM.from_pretrained(place).get_output_embeddings().weight.shape[0] == 260
    target, tokenizer = load(tmp_path / "copy" / "target")
    assert load_drafter(place, target, tokenizer).ids == len(ids)  # type: ignore[attr-defined]


def test_an_export_is_not_replaced_unasked_and_a_broken_one_never_appears(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    recipe = write_run(tmp_path / "copy")
    written = tmp_path / "copy" / "runs" / "small" / "recipe.yaml"
    written.write_text(written.read_text().replace(str(finished), str(tmp_path / "copy")))
    refused = inside("export", recipe)
    assert refused.returncode == 2
    assert "--force replaces it" in refused.stderr
    assert inside("export", recipe, "--format", "gguff").returncode == 2
    place = tmp_path / "copy" / "runs" / "small" / "export" / "transformers"
    before = (place / "README.md").read_bytes()
    shutil.rmtree(tmp_path / "copy" / "target")
    gone = inside("export", recipe, "--force")
    assert gone.returncode == 2
    assert "does not exist" in gone.stderr
    assert (place / "README.md").read_bytes() == before


def test_bad_input_gets_one_clear_line_before_any_long_work(finished: Path, tmp_path: Path) -> None:
    tiny_folder(tmp_path / "swapped", seed=4, swapped=(5, 6))
    tiny_folder(tmp_path / "other", seed=9)
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    cases = {
        ("run", "nothing.yaml"): "no recipe nothing.yaml",
        ("train", "eval.promts=x"): "did you mean prompts?",
        ("train", "name=a", "target.model=/gone/target"): "/gone/target does not exist",
        ("train", "name=b", "target.model=package:no_such/x.gguf"): "pip install",
        ("prepare", f"data.prompts={tmp_path / 'empty.jsonl'}"): "line 1: the prompt is empty",
        ("train", "name=x", f"data.prompts={tmp_path / 'gone.jsonl'}"): "does not exist",
        ("eval", "name=never-trained"): "holds no untrained draft yet",
        ("eval", f"eval.candidates=[{{drafter: {tmp_path / 'swapped'}}}]"): "id 5 is",
        ("eval", "eval.candidates=[{drafter: ngram}, {drafter: ngram}]"): "called the same",
        ("eval", "eval.candidates=[{drafter: run:bset}]"): "run:best",
        ("eval", "eval.candidates=[{drafter: ngarm}]"): "did you mean 'ngram'",
        ("eval", f"target.model={tmp_path / 'other'}", "eval.candidates=[{drafter: run:best}]"): "Measure it with its own target",
        ("run", "eval.prompts=gone.jsonl", "name=unmade"): "gone.jsonl does not exist",
        ("export", "train.epochs=99"): "holds a run with another train",
        ("train", "oops"): "neither an option nor an override",
        ("train", "draft.layers=[7]", "name=deep"): "layers 0..2",
        ("train", "train.loss={forward_lk: 1}", "name=lk"): "did you mean forward_kl?",
        ("train", "train.loss={}", "name=none"): "at least 1 item",
    }
    recipe = write_run(finished)
    for (command, *words), wanted in cases.items():
        done = inside(command, *([] if "nothing.yaml" in words else [recipe]), *words)
        assert done.returncode == 2, (words, done.stderr)
        assert wanted in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr, (words, done.stderr)


def test_accelerate_launch_is_the_same_command(finished: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    from runs import environment

    shutil.copytree(finished / "target", tmp_path / "target")
    recipe = write_run(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('the wrong train')")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
    ]
    command += ["--dynamo_backend", "no", "--cpu", "-m", "draftsmith.train", str(recipe)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr

    def weights(place: Path) -> bytes:
        return (runs.steps(place / "runs" / "small")[-1] / "draft" / "model.safetensors").read_bytes()

    assert weights(tmp_path) == weights(finished)


def test_run_again_trains_nothing_anew(finished: Path) -> None:
    run = finished / "runs" / "small"
    before = (run / "metrics.jsonl").read_bytes()
    done = draftsmith("run", write_run(finished), "eval.per_kind=1")
    assert done.returncode == 0, done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
    assert "2 of 4 prompts; for all of them: draftsmith eval" in done.stdout


def test_an_evaluation_leaves_a_page_that_needs_nothing_else(finished: Path) -> None:
    run = finished / "runs" / "small"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "trained" in page
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    assert report["guards"], "four prompts are too few, which a guard says"
    assert report["guards"][0] in (run / "report.md").read_text(encoding="utf-8")


def test_training_leaves_the_hashes_of_the_prompts_that_it_read(finished: Path) -> None:
    asked = [json.loads(line)["prompt"] for line in (finished / "train.jsonl").read_text().splitlines()]
    assert read_seen(finished / "runs" / "small") == {prompt_hash(one) for one in asked}
