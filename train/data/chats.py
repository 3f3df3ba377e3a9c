"""Chats to rows: each assistant's turn is scored, and nothing else. Where a turn lies is found by rendering the chat up to it,
so a row holds what the target will be asked when it is served, and never what a search for ids took for an answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from draftsmith.distill.batch import Example
from draftsmith.recipes.prompts import read_jsonl
from draftsmith.specdec.models import chat_ids
from draftsmith.train.data.render import Turn, rendered_turns

Chat = dict[str, Any]  # "key", and "turns" (messages, answer_ids; the target's own) or "messages"


@dataclass(frozen=True)
class Form:
    """What becomes of chats that are longer than `max_length`, which ids end a turn, and whether the target said them."""

    max_length: int
    long: Literal["leave_out", "split"] = "leave_out"
    ends: tuple[int, ...] = ()
    own_words: bool = True


class Made(NamedTuple):
    """The rows of a chat, what of it was left out and why, and what is worth a line in the report."""

    rows: list[Example]
    left_out: Counter[str]
    counted: Counter[str]


def of_answers(answers: Iterable[dict[str, Any]]) -> list[Chat]:
    """The answers of `draftsmith prepare`, one chat a prompt, in order."""
    chats: dict[str, Chat] = {}
    for row in answers:
        chats.setdefault(row["prompt"], {"key": row["prompt"], "turns": []})["turns"].append(row)
    for chat in chats.values():
        chat["turns"].sort(key=lambda row: row.get("turn", 0))
    return list(chats.values())


def chats_of(records: list[dict[str, Any]]) -> list[Chat]:
    """Chats as they are; of answers, those that they belong to."""
    return of_answers(records) if records and "answer_ids" in records[0] else records


def asked(chat: Chat) -> tuple[str, ...]:
    """What was said to the assistant in a chat: the prompt, whatever was answered to it and however it is called."""
    messages = chat["turns"][-1]["messages"] if "turns" in chat else chat["messages"]
    return tuple(json.dumps([one["role"], one["content"]]) for one in messages if one["role"] != "assistant")


def first_asked(chat: Chat) -> str | None:
    """The user's first turn, by which a prompt is known (recipes/seen.py); None in a chat without one."""
    messages = chat["turns"][0]["messages"] if "turns" in chat else chat["messages"]
    return next((one["content"] for one in messages if one["role"] == "user"), None)


def read_chats(path: Path) -> list[Chat]:
    """Chats of a JSONL or parquet file, each record with `messages` of role and content (OpenAI's form); all broken ones are named."""
    if path.suffix == ".parquet":
        from datasets import load_dataset

        records: Any = load_dataset("parquet", data_files=str(path), split="train")
    else:
        records = read_jsonl(path)
    chats, wrong = [], []
    for number, record in enumerate(records, 1):
        chat = chat_of(record, str(number))
        if isinstance(chat, str):
            wrong.append(f"record {number}: {chat}")
        else:
            chats.append(chat)
    if wrong:
        more = f"\n  ... and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(
            f"{path}: {len(wrong)} of {len(wrong) + len(chats)} records cannot be used:\n  " + "\n  ".join(wrong[:10]) + more
        )
    return chats


def chat_of(record: dict[str, Any], key: str) -> Chat | str:
    """The chat in a record, or what is wrong with it."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str) for one in messages
    ):
        return f"messages must be a list of objects with role and content, both text; found {', '.join(record) or 'nothing'}"
    # parquet fills what a message lacks with None, and a template would print it.
    messages = [{name: value for name, value in one.items() if value is not None} for one in messages]
    finished = record.get("finish_reason") != "length" and record.get("finished") is not False
    return {"key": str(record.get("id") or key), "messages": messages, "finished": finished}


def made(chat: Chat, tokenizer: Any, form: Form) -> Made:
    """The rows of one chat."""
    left_out: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    try:
        if "turns" in chat:
            turns = [Turn(chat_ids(tokenizer, row["messages"]), row["answer_ids"]) for row in chat["turns"]]
            counted["answers that were cut off"] += sum(row.get("finished") is False for row in chat["turns"])
        else:
            turns = rendered_turns(chat, tokenizer, form.ends or (tokenizer.eos_token_id,), left_out, counted)
    except ValueError as error:  # of this chat's roles, say; where it is so of all, `to_rows` raises with this count
        return Made([], Counter({str(error): 1}), counted)
    left_out["chat without an assistant's turn"] += not turns and not left_out
    left_out["empty answer"] += sum(not turn.said for turn in turns)
    rows, differ = joined([turn for turn in turns if turn.said], form.max_length if form.long == "leave_out" else 1 << 60)
    counted["turns in a row of their own, for the template renders history otherwise than it was said"] += differ
    fitting = []
    for row in rows:
        if len(row.ids) <= form.max_length:
            fitting.append(row)
        elif form.long == "split":
            pieces = split(row, form.max_length)
            counted["rows that were split"] += 1
            fitting += pieces
        else:
            left_out["longer than max_length"] += len(row.spans)
    counted["turns"] += sum(len(row.spans) for row in rows)
    if not form.own_words:
        counted["scored tokens that are not the target's own words"] += sum(row.scored for row in fitting)
    return Made(fitting, +left_out, +counted)


def reader(tokenizer: Any, form: Form) -> Callable[[dict[str, Any]], Made]:
    """`made` for one record of a file at a time, as a stream has them: a chat, or one answer of `draftsmith prepare`."""

    def read(record: dict[str, Any]) -> Made:
        chat = {"turns": [record]} if record.get("answer_ids") is not None else chat_of(record, "")
        return Made([], Counter({f"broken record: {chat}": 1}), Counter()) if isinstance(chat, str) else made(chat, tokenizer, form)

    return read


def joined(turns: list[Turn], longest: int) -> tuple[list[Example], int]:
    """One row for the turns of a chat wherever the next prompt begins with the very ids asked and said so far, and fits `longest`;
    and how many turns got another row because it does not (a template that strips thoughts from history, say)."""
    rows: list[Example] = []
    differ = 0
    for prompt, said in turns:
        ids = prompt + said
        span = (len(prompt), len(ids))
        before = rows[-1] if rows else Example([], ())
        same = prompt[: len(before.ids)] == before.ids
        differ += not same
        if rows and same and len(ids) <= longest:
            rows[-1] = Example(ids, (*before.spans, span))
        else:
            rows.append(Example(ids, (span,)))
    return rows, differ


def split(row: Example, longest: int) -> list[Example]:
    """Pieces of at most `longest` tokens in which each scored token is scored once, behind half of that in context or more
    wherever the row has it before (the piece then starts in the middle of a text, as the teacher sees it too)."""
    scored = [at for start, end in row.spans for at in range(start, end)]
    pieces = []
    while scored:
        start = max(0, min(scored[0] - longest // 2, len(row.ids) - longest))
        end = start + longest
        spans: list[tuple[int, int]] = []
        for at in (one - start for one in scored if one < end):
            if spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + 1)
            else:
                spans.append((at, at + 1))
        pieces.append(Example(row.ids[start:end], tuple(spans)))
        scored = [one for one in scored if one >= end]
    return pieces
