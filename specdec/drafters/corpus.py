"""Past outputs for a lookup: a JSONL file of texts or of their ids, each line checked before anything is decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_corpus(path: Path, tokenizer: Any, rows: int) -> list[list[int]]:
    """The ids of every line: a list of ids, a text (then `tokenizer` is needed), or a record with `answer_ids`, as
    `draftsmith prepare` writes. Ids lie in 0..`rows` - 1."""
    if not path.is_file():
        raise FileNotFoundError(f"the lookup's corpus {path} does not exist: a JSONL file of texts or of lists of ids is needed")
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            one = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if isinstance(one, dict):
            one = one.get("answer_ids")
        if isinstance(one, str):
            if tokenizer is None:
                raise ValueError(f"{where}: a text needs the target's tokenizer to become ids; give it, or write the ids")
            one = list(tokenizer(one, add_special_tokens=False).input_ids)
        if not isinstance(one, list) or not all(type(token) is int for token in one):
            raise ValueError(f"{where}: a list of ids, a text, or a record with answer_ids is needed, found {line[:60]}")
        if one and not 0 <= min(one) <= max(one) < rows:
            raise ValueError(
                f"{where}: ids {min(one)}..{max(one)}, the target has 0..{rows - 1}; a corpus is in its own target's ids"
            )
        texts.append(one)
    return texts
