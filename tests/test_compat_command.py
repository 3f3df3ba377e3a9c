"""`draftsmith compat`: what is printed, and the exit status that a script can trust."""

from __future__ import annotations

from pathlib import Path

from runs import inside
from tiny import tiny_folder, tiny_tokenizer


def test_a_pair_and_no_pair(tmp_path: Path) -> None:
    target, draft = tiny_folder(tmp_path / "target"), tiny_folder(tmp_path / "draft", seed=4)
    done = inside("compat", target, draft)
    assert done.returncode == 0, done.stderr
    for word in (
        "260 of the target's 260 tokens",
        "Chat templates: equal",
        "end of turn",
        "Draftsmith",
        "vLLM",
        "SGLang",
        "llama.cpp",
    ):
        assert word in done.stdout, word
    assert "ids differ" not in done.stdout
    assert "\x1b" not in done.stdout
    other = tiny_folder(tmp_path / "other", swapped=(5, 6))
    done = inside("compat", target, other)
    assert done.returncode == 1
    first = tiny_tokenizer().convert_ids_to_tokens(5)
    assert "2 ids differ" in done.stdout
    assert repr(first) in done.stdout
    assert "id 5 is" in done.stdout


def test_templates_and_positions_are_said(tmp_path: Path) -> None:
    target, draft = tiny_folder(tmp_path / "target"), tiny_folder(tmp_path / "draft")
    (tmp_path / "draft" / "chat_template.jinja").unlink()
    config = tmp_path / "draft" / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 2048', '"max_position_embeddings": 256'))
    done = inside("compat", target, draft)
    assert done.returncode == 0
    assert "only the target has one" in done.stdout
    assert "The draft serves 256 positions" in done.stdout


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    target = tiny_folder(tmp_path / "target")
    for words, wanted in {(target, str(tmp_path / "gone")): "does not exist", (target,): "required: DRAFT"}.items():
        done = inside("compat", *words)
        assert done.returncode == 2
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr
