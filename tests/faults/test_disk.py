"""A disk that takes no more ends a run with one clear line, and what was whole stays whole."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.recipes import files, runs
from draftsmith.recipes.checksums import damage
from draftsmith.recipes.files import whole_folder, writable
from draftsmith.train import run as training
from forks import Forks
from runs import inside, told, weights, write_run

WORDS = ["runs=runs", "train.epochs=1"]


def test_where_no_large_file_can_be_written_the_last_checkpoint_stays_and_the_run_goes_on_later(
    forked: Forks, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    assert forked.run(tmp_path / "whole", "train", str(write_run(tmp_path / "whole")), *WORDS).code == 0
    cut = tmp_path / "cut"
    cut.mkdir()
    command, run = ["train", str(write_run(cut)), *WORDS], cut / "runs" / "small"
    assert forked.run(cut, *command, signals=((signal.SIGTERM, "metrics.jsonl", 2),)).code == 75
    stopped = forked.run(cut, *command, limit=20_000)
    assert stopped.code == 2
    assert (
        "cannot write runs/small/step-4: no file may be that large in runs/small; nothing written before was touched"
        in stopped.stderr
    )
    assert "Traceback" not in stopped.stderr
    assert [one.name for one in runs.named(run)] == ["step-2"]
    assert damage(run / "step-2") is None
    assert not list(run.glob(".step*"))
    stopped = forked.run(cut, *command, limit=(run / "metrics.jsonl").stat().st_size + 10)
    assert stopped.code == 2
    assert "runs/small/" in stopped.stderr
    assert "no file may be that large" in stopped.stderr
    assert forked.run(cut, *command).code == 0
    assert weights(run) == weights(tmp_path / "whole" / "runs" / "small")
    assert told(run) == told(tmp_path / "whole" / "runs" / "small")


@pytest.mark.parametrize("writes", ["torch", "safetensors"])
def test_what_libraries_say_of_a_write_that_was_cut_short_is_understood(tmp_path: Path, writes: str) -> None:
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            with whole_folder(tmp_path / "out") as beside:
                some = {"a": torch.zeros(9_000)}
                torch.save(some, beside / "a") if writes == "torch" else save_file(some, beside / "a")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__} {error}".encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        said = stream.read()
    assert said.startswith("OSError "), said
    assert f"cannot write {tmp_path / 'out'}: " in said
    assert ("torch could not write all of it" if writes == "torch" else "no file may be that large") in said
    assert not list(tmp_path.iterdir())


def test_a_run_folder_that_cannot_be_written_to_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_run(tmp_path)
    monkeypatch.setattr(training, "load", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "runs").write_text("a file")
    done = inside("train", recipe)
    assert done.returncode == 2
    assert f"cannot write into {tmp_path / 'runs' / 'small'}: a file stands in its way. Set runs=FOLDER" in done.stderr
    (tmp_path / "runs").unlink()
    for number, why in ((errno.EROFS, "it is read-only"), (errno.EACCES, "it may not be written to")):

        def refuse(path: Path, data: bytes, number: int = number) -> int:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(Path, "write_bytes", refuse)
        done = inside("train", recipe)
        assert done.returncode == 2
        assert f"cannot write {tmp_path / 'runs' / 'small'}: {why} in" in done.stderr
        assert "Set runs=FOLDER to one that may be written to" in done.stderr
        assert [one.name for one in (tmp_path / "runs").rglob("*")] == ["small"]


def test_what_may_not_be_read_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(PermissionError) as found, whole_folder(tmp_path / "out"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/elsewhere/target")
    assert "cannot write" not in str(found.value)
    writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    assert set(files.SPENT) & set(files.DENIED) == set()
