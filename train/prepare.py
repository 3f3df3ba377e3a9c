"""`draftsmith prepare`: the target answers the training prompts once; a kill loses at most the batch in the making."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.distill.rollout import answer
from draftsmith.recipes import Prompt
from draftsmith.recipes.files import append_lines, room_for, write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.prompts import read_jsonl
from draftsmith.recipes.schema import Data
from draftsmith.specdec import Sampling

Row = dict[str, Any]


def manifest(data: Data, prompts: list[Prompt], target: str, revision: str, tokenizer: Any, seed: int) -> Row:
    """What a file of answers depends on; answers made under another manifest are never mixed in."""
    asked = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    return identity(revision, tokenizer) | {
        "target": target, "prompts": asked, "sampling": data.sampling.model_dump(),
        "max_new_tokens": data.max_new_tokens, "batch_size": data.batch_size, "seed": seed,
    }  # fmt: skip


def prepare(path: Path, about: Row, data: Data, prompts: list[Prompt], target: PreTrainedModel, tokenizer: Any) -> list[Row]:
    """Write the answers to `path` (one JSON object an answer) and `path` + .json (the manifest with counts).

    Goes on from `path`.partial where an interrupted call left one of the same manifest, and ends with the same bytes.
    """
    room_for(path.parent, len(prompts) * data.max_new_tokens * 16, path)
    how, seed = Sampling(**data.sampling.model_dump()), about["seed"]
    partial = path.with_name(path.name + ".partial")
    done = _resume(partial, about)
    batches = _batches(prompts, data.batch_size)
    progress = Progress("answering", len(batches), unit="batches")
    started = time.perf_counter()
    for number, batch in enumerate(batches):
        progress.at(number, f"{sum(len(rows) for rows in done.values())} answers")
        if number in done:
            continue
        rows = _answer_batch(batch, target, tokenizer, how, data.max_new_tokens, seed)
        append_lines(partial, [json.dumps({"batch": number, "rows": rows}, ensure_ascii=False)])
        done[number] = rows
    progress.done()
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    rows = sorted((row for number in done for row in done[number]), key=lambda row: (order[row["prompt"]], row["turn"]))
    finished = sum(row["finished"] for row in rows)
    tokens = sum(len(row["answer_ids"]) for row in rows)
    counts = {"answers": len(rows), "tokens": tokens, "finished": finished, "cut_off": len(rows) - finished}
    print(
        f"{len(rows)} answers, {tokens} tokens: {finished} ended by themselves, {len(rows) - finished} were cut off at {data.max_new_tokens}"
    )
    print(f"{tokens / max(time.perf_counter() - started, 1e-9):.0f} tokens/s; written to {path}")
    # The manifest first: answers that are there always have one.
    write_whole(path.with_name(path.name + ".json"), json.dumps(about | counts, indent=1) + "\n")
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    partial.unlink(missing_ok=True)
    return rows


def read_answers(path: Path, asked: Row) -> list[Row]:
    """Answers made earlier; refused where their manifest says something else than `asked`, such as another target's revision."""
    beside = path.with_name(path.name + ".json")
    if not beside.is_file():
        raise FileNotFoundError(
            f"{path} has no {beside.name} beside it, so nothing says which target gave these answers; run draftsmith prepare"
        )
    about = json.loads(beside.read_text(encoding="utf-8"))
    changed = [f"{name} is {about.get(name)} there and {value} here" for name, value in asked.items() if about.get(name) != value]
    if changed:
        raise ValueError(
            f"{path} does not fit this run: {'; '.join(changed)}. A draft learns what its own target says: "
            "remove the file, or data.answers from the recipe, to make new answers"
        )
    rows = read_jsonl(path)
    needed = {"prompt", "messages", "answer_ids"}
    for number, row in enumerate(rows, 1):
        if missing := needed - row.keys():
            raise ValueError(
                f"{path}, line {number}: an answer needs {', '.join(sorted(missing))}; was this file made by draftsmith prepare?"
            )
    return rows


def identity(revision: str, tokenizer: Any) -> Row:
    """What answers to any prompts must share with a run: the target's revision and the chat template."""
    return {"revision": revision, "chat_template": hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()[:16]}


def _batches(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of like length together. The plan hangs on the prompts alone, so a resumed run answers the same batches."""
    ordered = sorted(prompts, key=lambda prompt: sum(map(len, prompt.turns)) + sum(len(m["content"]) for m in prompt.history))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _answer_batch(
    batch: list[Prompt], target: PreTrainedModel, tokenizer: Any, how: Sampling, max_new_tokens: int, seed: int
) -> list[Row]:
    """Every user turn of every prompt in turn, the target's own earlier answers in between."""
    chats = [list(prompt.history) for prompt in batch]
    rows: list[Row] = []
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        playing = [i for i, prompt in enumerate(batch) if turn < len(prompt.turns)]
        for i in playing:
            chats[i].append({"role": "user", "content": batch[i].turns[turn]})
        for i, said in zip(playing, answer(target, tokenizer, [chats[i] for i in playing], how, max_new_tokens, seed), strict=True):
            row = {"prompt": batch[i].id, "turn": turn, "category": batch[i].category, "messages": list(chats[i])}
            rows.append(row | {"answer": said.text, "finished": said.finished, "answer_ids": said.ids})
            chats[i].append({"role": "assistant", "content": said.text})
    return rows


def _resume(partial: Path, about: Row) -> dict[int, list[Row]]:
    """The batches already answered: {batch number: rows}; starts the file with the manifest where there is none."""
    if not partial.is_file():
        append_lines(partial, [json.dumps(about)])
        return {}
    raw = partial.read_bytes()
    complete = raw[: raw.rfind(b"\n") + 1]  # a kill can leave a last line without its end
    lines = [json.loads(line) for line in complete.splitlines()]
    if lines and lines[0] != about:
        changed = ", ".join(sorted(key for key in about if lines[0].get(key) != about[key]))
        raise ValueError(f"{partial} holds answers made with another {changed}; remove it, or set them back, to go on")
    if len(complete) < len(raw):
        write_whole(partial, complete.decode())
    if not lines:
        append_lines(partial, [json.dumps(about)])
    return {line["batch"]: line["rows"] for line in lines[1:]}
