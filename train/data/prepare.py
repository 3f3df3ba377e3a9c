"""`draftsmith prepare`: the target answers the training prompts once; a kill loses at most the batch in the making."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.distill.rollout import Answer, Answerer, answer, answer_served, ends
from draftsmith.distill.served.at_once import Unanswered
from draftsmith.distill.served.target import ServedTarget
from draftsmith.recipes import Prompt
from draftsmith.recipes.files import append_lines, appended, room_for, write_whole
from draftsmith.recipes.progress import Progress
from draftsmith.recipes.prompts import read_jsonl
from draftsmith.recipes.schema import Data, Server
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
    """`write_answers` with the target at hand."""
    how, most, seed = Sampling(**data.sampling.model_dump()), data.max_new_tokens, about["seed"]
    return write_answers(path, about, data, prompts, lambda chats: answer(target, tokenizer, chats, how, most, seed))


def prepare_served(
    path: Path, about: Row, data: Data, prompts: list[Prompt], server: ServedTarget, target: str, tokenizer: Any
) -> list[Row]:
    """`write_answers` with a served target; `target` names the model here, whose tokenizer and settings are read but no weights."""
    how, most, seed = Sampling(**data.sampling.model_dump()), data.max_new_tokens, about["seed"]
    stop = ends(target, tokenizer)
    server.check(tokenizer)
    return write_answers(path, about, data, prompts, lambda chats: answer_served(server, tokenizer, stop, chats, how, most, seed))


def served_target(server: Server) -> ServedTarget:
    return ServedTarget(server.url, server.model, server.concurrency, server.timeout, server.retries)


def served_revision(model: str, revision: str | None) -> str:
    """What stands for the revision of a served target: its name there, and what the user knows of its version. Where it is served
    is no part of it."""
    return f"served:{model}@{revision or 'unknown'}"


def write_answers(path: Path, about: Row, data: Data, prompts: list[Prompt], answerer: Answerer) -> list[Row]:
    """Write the answers to `path` (one JSON object an answer) and `path` + .json (the manifest with counts).

    Goes on from `path`.partial where an interrupted call left one of the same manifest, and ends with the same bytes. Where some
    prompts get no answer those of their batch that do are kept, and the next call asks for the rest.
    """
    room_for(path.parent, len(prompts) * data.max_new_tokens * 16, path)
    partial = path.with_name(path.name + ".partial")
    done = _resume(partial, about)
    batches = _batches(prompts, data.batch_size)
    progress = Progress("answering", len(batches), unit="batches")
    started, before = time.perf_counter(), sum(len(row["answer_ids"]) for rows in done.values() for row in rows)
    for number, batch in enumerate(batches):
        progress.at(number, f"{sum(map(len, done.values()))} answers")
        missing = [prompt for prompt in batch if prompt.id not in done]
        if not missing:
            continue
        rows, failed = _answer_batch(missing, answerer)
        if rows:
            append_lines(partial, [json.dumps({"batch": number, "rows": rows}, ensure_ascii=False)])
        _sort_in(done, rows)
        if failed:
            raise RuntimeError(
                f"{failed}. {sum(map(len, done.values()))} answers are kept in {partial}; the same command asks for the rest"
            )
    progress.done()
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    rows = sorted((row for some in done.values() for row in some), key=lambda row: (order[row["prompt"]], row["turn"]))
    finished = sum(row["finished"] for row in rows)
    tokens = sum(len(row["answer_ids"]) for row in rows)
    counts = {"answers": len(rows), "tokens": tokens, "finished": finished, "cut_off": len(rows) - finished}
    print(
        f"{len(rows)} answers, {tokens} tokens: {finished} ended by themselves, {len(rows) - finished} were cut off at {data.max_new_tokens}"
    )
    print(f"{(tokens - before) / max(time.perf_counter() - started, 1e-9):.0f} tokens/s; written to {path}")
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


def _answer_batch(batch: list[Prompt], answerer: Answerer) -> tuple[list[Row], str]:
    """Every user turn of every prompt in turn, the target's own earlier answers in between -> the rows of those prompts that got
    all their answers, and what went wrong with the first of the others ("" where nothing did)."""
    chats = [list(prompt.history) for prompt in batch]
    rows: list[list[Row]] = [[] for _ in batch]
    failed = ""
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        playing = [i for i, prompt in enumerate(batch) if turn < len(prompt.turns)]
        for i in playing:
            chats[i].append({"role": "user", "content": batch[i].turns[turn]})
        answers: list[Answer | None]
        try:
            answers = [*answerer([chats[i] for i in playing])]
        except Unanswered as some:
            answers, first = some.done, min(some.why)
            failed = f"prompt {batch[playing[first]].id}: {some.why[first]}"
        for i, said in zip(playing, answers, strict=True):
            if said is not None:
                row = {"prompt": batch[i].id, "turn": turn, "category": batch[i].category, "messages": list(chats[i])}
                rows[i].append(row | {"answer": said.text, "finished": said.finished, "answer_ids": said.ids})
                chats[i].append({"role": "assistant", "content": said.text})
        if failed:
            break  # prompts with a turn to come are asked anew, with the rest
    return [row for prompt, its in zip(batch, rows, strict=True) if len(its) == len(prompt.turns) for row in its], failed


def _resume(partial: Path, about: Row) -> dict[str, list[Row]]:
    """What was answered already: {prompt id: rows}; starts the file with the manifest where there is none."""
    lines = [json.loads(line) for line in appended(partial)]
    if not lines:
        append_lines(partial, [json.dumps(about)])
        return {}
    if lines[0] != about:
        changed = ", ".join(sorted(key for key in about if lines[0].get(key) != about[key]))
        raise ValueError(f"{partial} holds answers made with another {changed}; remove it, or set them back, to go on")
    done: dict[str, list[Row]] = {}
    for line in lines[1:]:
        _sort_in(done, line["rows"])
    return done


def _sort_in(done: dict[str, list[Row]], rows: list[Row]) -> None:
    for row in rows:
        done.setdefault(row["prompt"], []).append(row)
