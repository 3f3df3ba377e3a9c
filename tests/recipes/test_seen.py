"""prompts.sha256: which prompts a training read, once each, sorted, and the same for texts that differ only in looks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from draftsmith.recipes.seen import prompt_hash, read_seen, write_seen


def test_the_hash_is_of_the_normalised_text() -> None:
    assert prompt_hash("  Why\n\tIS the\u00a0sky\u2003blue? ") == hashlib.sha256(b"why is the sky blue?").hexdigest()
    assert prompt_hash("\ufb01ne \uff21") == prompt_hash("fine a")  # a ligature, a full-width letter
    assert prompt_hash("cafe\u0301") == prompt_hash("caf\u00e9")
    assert prompt_hash("a b") != prompt_hash("ab")


def test_the_file_holds_each_once_sorted_and_is_left_alone_where_it_says_the_same(tmp_path: Path) -> None:
    assert read_seen(tmp_path) is None
    write_seen(tmp_path, ["one", "Two", "two ", "three"])
    path = tmp_path / "prompts.sha256"
    lines = path.read_text().splitlines()
    assert lines == sorted({prompt_hash(one) for one in ("one", "two", "three")})
    before = path.stat().st_ino
    write_seen(tmp_path, ["three", "two", "one"])
    assert path.stat().st_ino == before
    write_seen(tmp_path, ["one"])
    assert read_seen(tmp_path) == {prompt_hash("one")}
