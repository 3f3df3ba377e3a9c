"""Writing: whole or not there, also when the disk is full or the process dies in the middle."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from draftsmith.recipes.files import append_lines, appended, room_for, whole_folder, write_whole


def fail() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with whole_folder(tmp_path / "out") as beside:
            (beside / "a").write_text(text)
            assert not (tmp_path / "out" / "a").exists() or (tmp_path / "out" / "a").read_text() == "first"
            (beside / "b").write_text(text)
        assert (tmp_path / "out" / "a").read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")],
)
def test_a_full_disk_leaves_the_old_folder_and_says_what_to_do(tmp_path: Path, error: Exception) -> None:
    with whole_folder(tmp_path / "out") as beside:
        (beside / "a").write_text("old")
    with (  # noqa: PT012
        pytest.raises(OSError, match=r"the disk is full.*nothing written before was touched.*Free some space") as found,
        whole_folder(tmp_path / "out") as beside,
    ):
        (beside / "a").write_text("new")
        raise error
    assert found.value.errno == errno.ENOSPC
    assert (tmp_path / "out" / "a").read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_what_will_not_fit_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"needs \d+ MB, \d+ MB are free"), whole_folder(tmp_path / "out", needs=1 << 60):
        pytest.fail("nothing may be written")
    with pytest.raises(OSError, match="are free"):
        room_for(tmp_path, 1 << 60, tmp_path / "x")


def test_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "a", "old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: fail())
    for write in (lambda: write_whole(tmp_path / "a", "new"), lambda: append_lines(tmp_path / "lines", ["x"])):
        with pytest.raises(OSError, match="the disk is full"):
            write()
    assert (tmp_path / "a").read_text() == "old"


def test_a_line_that_a_kill_cut_off_is_dropped_and_the_next_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert appended(path) == []
    assert not path.exists()
    append_lines(path, ["a\u2028b", "c\rd"])
    path.write_bytes(path.read_bytes() + "é".encode()[:1])
    assert appended(path) == ["a\u2028b", "c\rd"]
    append_lines(path, ["e"])
    assert appended(path) == ["a\u2028b", "c\rd", "e"]


def test_other_errors_keep_their_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), whole_folder(tmp_path / "out"):
        raise ValueError("mine")
    assert not (tmp_path / "out").exists()
