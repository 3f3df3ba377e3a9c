"""A folder's SHA256SUMS says what is in it, to us and to `sha256sum -c`: a file that changed, is missing or was added is named."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUMS = "SHA256SUMS"


def write_sums(folder: Path) -> None:
    """Write `folder`/SHA256SUMS of all files in it; to be called when all of them are there."""
    lines = [f"{sha256(path)}  {name}\n" for name, path in _files(folder).items()]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def damage(folder: Path, only: str = "") -> str | None:
    """The first file that is not as it was written, and what was expected of it; None where all of them are. `only`: of those
    whose names begin so."""
    listed, found = folder / SUMS, {name: path for name, path in _files(folder).items() if name.startswith(only)}
    if not listed.is_file():
        return f"it has no {SUMS}, which is written last"
    text = listed.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):
        return f"its {SUMS} is cut off after {listed.stat().st_size} bytes"
    sums = {name: checksum for checksum, _, name in (line.partition("  ") for line in text.splitlines())}
    for name, checksum in sums.items():
        if not name.startswith(only):
            continue
        if name not in found:
            return f"{name} is missing, of which sha256 {checksum} was expected"
        if (now := sha256(found[name])) != checksum:
            return f"{name} ({found[name].stat().st_size} bytes) has sha256 {now}, expected was {checksum}"
    added = [name for name in found if name not in sums]
    return f"{added[0]} is not in its {SUMS}" if added else None


def sha256(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            whole.update(block)
    return whole.hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found.pop(SUMS, None)
    return found
