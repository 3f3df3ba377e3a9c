"""prompts.sha256 of a run folder: which prompts its training read, as hashes, so that an evaluation can say which it asks again.

A prompt is known by the user's first turn alone, since what follows may differ from answer to answer. Before it is hashed, its letters
take their compatibility form (NFKC) and lose their case, and every stretch of white space becomes one blank.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from draftsmith.recipes.files import write_whole

NAME = "prompts.sha256"


def prompt_hash(text: str) -> str:
    """SHA-256 of the normalised text, in hexadecimal."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()


def write_seen(folder: Path, texts: Iterable[str]) -> None:
    """The hashes of the texts, each once, one a line, sorted; a file that says the same is left as it is."""
    said = "".join(f"{one}\n" for one in sorted({prompt_hash(text) for text in texts}))
    path = folder / NAME
    if not path.is_file() or path.read_text(encoding="ascii") != said:  # processes of one run call this one after another
        write_whole(path, said)


def trained_in(draft: Path) -> Path | None:
    """The run that a draft's folder lies in (a checkpoint's, an export's): the nearest above it that says what its training read."""
    place = draft.resolve()
    return next((one for one in (place, *place.parents) if (one / NAME).is_file()), None)


def read_seen(folder: Path) -> frozenset[str] | None:
    """The hashes that a run wrote; None where it wrote none."""
    path = folder / NAME
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8", errors="replace").split()
    if wrong := next((one for one in lines if len(one) != 64 or set(one) - set("0123456789abcdef")), None):
        raise ValueError(
            f"{path} holds {wrong[:80]!r}, which is no SHA-256. Remove the file; the next draftsmith train writes it anew"
        )
    return frozenset(lines)
