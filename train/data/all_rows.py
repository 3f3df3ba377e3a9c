"""The rows of all chats of a run, by one process or several; what several made is kept under a name that hangs on all it hangs on."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.distill.batch import Example
from draftsmith.train.data.chats import Chat, Form, Made, made

MADE_BY = 1  # counted up when the same chat would become another row, for rows that were kept


def all_made(chats: list[Chat], tokenizer: Any, form: Form, workers: int = 1, cache: Path | None = None) -> Iterator[Made]:
    """`made` of each chat, in order; with several workers through `datasets.map`, kept in `cache` under a name that hangs on
    everything the rows hang on."""
    if workers == 1:
        yield from (made(chat, tokenizer, form) for chat in chats)
        return
    from datasets import Dataset

    texts = [json.dumps(chat) for chat in chats]
    name = fingerprint(tokenizer, form, texts)
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    # One column of JSON: a type that is the same whatever a worker's share of the chats holds.
    count = min(workers, len(texts)) or 1
    try:
        rows = Dataset.from_dict({"chat": texts}).map(
            partial(_made_text, tokenizer=tokenizer, form=form), num_proc=count, remove_columns=["chat"], new_fingerprint=name,
            cache_file_name=None if cache is None else str(cache / f"rows-{name}.arrow"), desc="chats to rows",
        )  # fmt: skip
    except RuntimeError as error:
        if "died" not in str(error):  # datasets has no class of its own for it
            raise
        raise RuntimeError(
            f"one of {count} data workers died while it made rows of chats: it was killed (a system short of memory does that), or crashed. "
            f"Nothing was kept of them; the same command makes them anew, and data.workers={max(1, count // 2)} takes less memory"
        ) from error
    for row in rows:
        examples, left_out, counted = json.loads(row["made"])
        yield Made([Example(ids, tuple((a, b) for a, b in spans)) for ids, spans in examples], Counter(left_out), Counter(counted))


def fingerprint(tokenizer: Any, form: Form, texts: Iterable[str] = ()) -> str:
    """Of the tokenizer, its template, the form and the chats: rows kept under another one are never read."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    speech = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    digest = hashlib.sha256()
    for text in (str(MADE_BY), speech, str(tokenizer.chat_template), json.dumps(asdict(form)), *texts):
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def _made_text(row: dict[str, str], tokenizer: Any, form: Form) -> dict[str, str]:
    return {"made": json.dumps(made(json.loads(row["chat"]), tokenizer, form))}
