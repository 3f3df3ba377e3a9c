"""Nothing half-written is ever found under its own name: files and folders are written beside it, synced, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path, needs: int = 0) -> Iterator[Path]:
    """A folder to fill; it takes the name `folder`, replacing what was there, only when the block ends without an error.

    `needs` bytes are checked for before anything is written.
    """
    room_for(folder.parent, needs, folder)
    beside = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)  # what a killed process left
    with _disk_errors(folder):
        beside.mkdir(parents=True)
        try:
            yield beside
            for one in [*beside.rglob("*"), beside]:
                _sync(one)
            if folder.exists():
                old = folder.with_name(f".{folder.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                folder.rename(old)
                beside.rename(folder)
                shutil.rmtree(old)
            else:
                beside.rename(folder)
            _sync(folder.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old one or the new one, never a part."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write; it takes the name `path` only when the block ends without an error."""
    beside = path.with_name(f".{path.name}.writing")
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield beside
            _sync(beside)
            beside.replace(path)
            _sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def remove_whole(folder: Path) -> None:
    """Remove a folder so that no part of it is ever found under its name."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    shutil.rmtree(old)


def append_lines(path: Path, lines: list[str], synced: bool = True) -> None:
    """Append whole lines and sync them; `appended` reads them. A kill takes nothing that is not `synced`; a machine that goes down may."""
    with _disk_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()
        if synced:
            os.fsync(stream.fileno())


def appended(path: Path) -> list[str]:
    """The lines that `append_lines` wrote, none where there is no file; a last one without its end, as a kill can leave it, is dropped
    from the file too, or the next would be joined to it."""
    if not path.is_file():
        return []
    raw = path.read_bytes()
    end = raw.rfind(b"\n") + 1
    whole = raw[:end].decode()
    if end < len(raw):
        write_whole(path, whole)
    return whole.split("\n")[:-1]  # splitlines would split at other ends of lines too, which JSON may hold


def sync(path: Path) -> None:
    """Have on the disk what was written of a file or folder."""
    with _disk_errors(path):
        _sync(path)


def room_for(where: Path, needs: int, what: Path) -> None:
    """OSError before a long work that could not be saved."""
    with _disk_errors(where):
        where.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(where).free
    if free < needs:
        raise OSError(errno.ENOSPC, _full(what, where, f"needs {needs / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"))


def writable(folder: Path) -> None:
    """OSError before a long work whose results could not be written."""
    try:
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink(missing_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OSError(error.errno, f"cannot write into {folder}: a file stands in its way. Set runs=FOLDER or name=...") from error


FREE, ELSEWHERE = "Free some space or set runs=FOLDER", "Set runs=FOLDER to one that may be written to"
# What the system may say of a write: what it means, and what to do. safetensors has it in an error of its own, by its words.
SPENT = {
    errno.ENOSPC: ("the disk is full", FREE),
    errno.EDQUOT: ("the quota is used up", FREE),
    errno.EFBIG: ("no file may be that large", "Raise the limit (ulimit -f) or set runs=FOLDER"),
    errno.EROFS: ("it is read-only", ELSEWHERE),
}
DENIED = {errno.EACCES: ("it may not be written to", ELSEWHERE), errno.EPERM: ("it may not be written to", ELSEWHERE)}


@contextmanager
def _disk_errors(what: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        said, number = str(error), getattr(error, "errno", None)
        if number is None:
            number = next((one for one in SPENT if os.strerror(one) in said), None)
        meant = SPENT.get(number)  # type: ignore[arg-type]
        if str(getattr(error, "filename", None)).startswith(str(what.parent)):  # what may not be read is another matter
            meant = meant or DENIED.get(number)  # type: ignore[arg-type]
        if "inline_container" in said:  # torch.save only says that its archive came out short
            number, meant = errno.ENOSPC, ("torch could not write all of it: the disk, a quota or a limit is full", FREE)
        if meant is not None and "nothing written before was touched" not in said:
            raise OSError(number, _full(what, what.parent, *meant)) from error
        raise


def _full(what: Path, where: Path, why: str, do: str = FREE) -> str:
    return f"cannot write {what}: {why} in {where}; nothing written before was touched. {do}, then repeat the command: it goes on"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
