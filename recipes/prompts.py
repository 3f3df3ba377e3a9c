"""Prompts from a JSONL file or a data set's name; every record is checked before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.recipes.paths import find


class Prompt(NamedTuple):
    """A conversation to be answered: the messages given so far and the user turns that follow, played one by one."""

    id: str
    category: str
    history: list[dict[str, str]]  # given messages, {role, content}, that come before the turns
    turns: list[str]


def read_prompts(name: str) -> list[Prompt]:
    """Prompts of a JSONL file, of a folder that `datasets` loads, or of a data set's name where a hub is reachable.

    A record holds `turns` (user turns), `messages` (role and content, as chat sets do) or `prompt`; `id` and `category`
    are optional. Every broken record is listed, with its line, in one ValueError.
    """
    if _is_a_dataset(name):
        from datasets import load_dataset

        try:
            split = load_dataset(name, split="train")
        except Exception as error:  # datasets raises many kinds, the cause often behind a general one
            raise ValueError(f"{name} is no file here, and datasets cannot load it: {error.__cause__ or error}") from error
        rows: Iterator[tuple[str, Any]] = ((f"row {i}", row) for i, row in enumerate(split))
    else:
        rows = _lines(find(name))
    prompts: list[Prompt] = []
    wrong: list[str] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        read = row if isinstance(row, str) else _prompt(row, where)
        if isinstance(read, str):
            wrong.append(f"{where}: {read}")
        elif read.id in seen:
            wrong.append(f"{where}: id {read.id!r} was used in {seen[read.id]} already")
        else:
            seen[read.id] = where
            prompts.append(read)
    if wrong:
        shown = "\n  ".join(wrong[:10]) + (f"\n  ... and {len(wrong) - 10} more" if len(wrong) > 10 else "")
        raise ValueError(f"{name}: {len(wrong)} of {len(wrong) + len(prompts)} records cannot be used:\n  {shown}")
    if not prompts:
        raise ValueError(f"{name} holds no prompts")
    return prompts


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All records of a JSONL file that this project wrote; a broken line is named."""
    rows = []
    for where, row in _lines(path):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {where}: {row if isinstance(row, str) else 'not a JSON object'}")
        rows.append(row)
    return rows


def _is_a_dataset(name: str) -> bool:
    """A folder of data files, or a name that only a hub can know; a name that ends like a file is a file, here or missing."""
    if Path(name).suffix in (".jsonl", ".json"):
        return False
    try:
        return find(name).is_dir()
    except FileNotFoundError:
        return True


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    yield f"line {number}", f"not UTF-8 ({error.reason} at byte {error.start})"
                except json.JSONDecodeError as error:
                    yield f"line {number}", f"not JSON ({error.msg} at column {error.colno})"


def _prompt(row: Any, where: str) -> Prompt | str:
    """The prompt in a record, or what is wrong with it."""
    if not isinstance(row, dict):
        return f"a JSON object is needed, found {type(row).__name__}"
    # `datasets` fills absent columns with None, and chat sets carry a `prompt` beside their messages.
    given = [key for key in ("messages", "turns", "prompt") if row.get(key) is not None][:1]
    if not given:
        return f"one of prompt, turns or messages is needed, found {', '.join(row) or 'nothing'}"
    history: list[dict[str, str]] = []
    if given == ["messages"]:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in messages
        ):
            return "messages must be a list of objects with role and content"
        history = [{"role": str(m["role"]), "content": m["content"]} for m in messages]
        while history and history[-1]["role"] == "assistant":
            history.pop()  # the answer is to be the target's own
        if not history or history[-1]["role"] != "user":
            return "messages hold no user turn to answer"
        turns: Any = [history.pop()["content"]]
    else:
        turns = row["turns"] if given == ["turns"] else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return f"{given[0]} must be text" if given == ["prompt"] else "turns must be a list of texts"
    if any(not turn.strip() for turn in turns):
        return "the prompt is empty"
    if any("\ud800" <= letter <= "\udfff" for text in (*turns, *(one["content"] for one in history)) for letter in text):
        return "the text holds half a character (a lone surrogate)"
    known = row.get("id")  # 0 is one
    return Prompt(where if known in (None, "") else str(known), str(row.get("category") or "all"), history, turns)
