"""From a recipe's data to rows and the order in which they are seen: answers made or found, chats read, streams opened."""

from __future__ import annotations

from typing import Any

from draftsmith.distill.batch import Example
from draftsmith.recipes import Recipe, read_prompts
from draftsmith.recipes.paths import find
from draftsmith.recipes.schema import CheckpointDraft
from draftsmith.recipes.seen import write_seen
from draftsmith.specdec.models import eos_ids
from draftsmith.train.data.all_rows import fingerprint
from draftsmith.train.data.chats import Chat, Form, first_asked, of_answers, read_chats, reader
from draftsmith.train.data.plan import Order, Plan, Rows, to_rows
from draftsmith.train.data.prepare import identity, manifest, prepare, prepare_served, read_answers, served_revision, served_target
from draftsmith.train.data.stream import BUILDERS, Stream

HELD_OUT = 512  # rows of a stream that are kept back to judge by


def answers(recipe: Recipe, target: Any, tokenizer: Any, revision: str) -> list[Chat]:
    """The target's answers to the training prompts, a chat an answered prompt: of the files that the recipe names, or made in the run
    folder. A prompt that several files answer is as many chats."""
    data, server = recipe.data, recipe.server
    if server is not None:
        revision = served_revision(server.model, server.revision)
    if files := [find(one) for one in data.answer_files]:
        return [chat for path in files for chat in of_answers(read_answers(path, identity(revision, tokenizer)))]
    return of_answers(_of_the_run(recipe, target, tokenizer, revision))


def _of_the_run(recipe: Recipe, target: Any, tokenizer: Any, revision: str) -> list[dict[str, Any]]:
    data, server = recipe.data, recipe.server
    prompts = read_prompts(data.prompts)
    name = recipe.target.model if server is None else server.model
    about = manifest(data, prompts, name, revision, tokenizer, recipe.seed)
    path = recipe.folder / "answers.jsonl"
    if path.is_file():
        return read_answers(
            path, {what: value for what, value in about.items() if what != "target"}
        )  # its revision tells, not its name
    if server is not None:
        return prepare_served(path, about, data, prompts, served_target(server), recipe.target.model, tokenizer)
    return prepare(path, about, data, prompts, target, tokenizer)


def form(recipe: Recipe, target: Any, tokenizer: Any) -> Form:
    """How the recipe wants its rows made."""
    data = recipe.data
    return Form(data.max_length, data.long, tuple(eos_ids(target, tokenizer)), data.words != "others")


def ordered(recipe: Recipe, target: Any, tokenizer: Any, name: str, size: int) -> tuple[Rows, Order]:
    """The recipe's rows and the order in which steps of `size` see them; of a stream, the rows that a warm start takes."""
    data, settings, how = recipe.data, recipe.train, form(recipe, target, tokenizer)
    if not data.stream:
        chats = read_chats(find(data.prompts)) if data.format == "messages" else answers(recipe, target, tokenizer, name)
        rows = to_rows(
            chats, tokenizer, data.max_length, data.held_out, recipe.seed, data.rows, how, data.workers, recipe.folder / "rows"
        )
        write_seen(recipe.folder, filter(None, map(first_asked, chats)))  # held-out ones too: the checkpoint is chosen by them
        return rows, Plan(rows.train, size, settings.epochs, recipe.seed, data.pack)
    place = find(data.prompts)
    files = sorted(one for one in place.iterdir() if one.suffix in BUILDERS) if place.is_dir() else [place]
    stream = Stream(
        files, reader(tokenizer, how), size, settings.steps, recipe.seed, block=data.stream, pack=data.pack, held_out=data.held_out,
        of=fingerprint(tokenizer, how),
    )  # fmt: skip
    first: list[Example] = []
    wanted = 0 if isinstance(recipe.draft, CheckpointDraft) else recipe.draft.warm_start_tokens
    for number in range(settings.steps):
        if sum(row.scored for row in first) >= wanted:
            break
        first += [row for one in stream.step(number) for row in (one if isinstance(one, list) else [one])]
    held_out = stream.held_out(HELD_OUT)
    if not held_out:
        raise ValueError(f"{place} holds no row to keep back; raise data.held_out ({data.held_out})")
    return Rows(first, held_out, stream.left_out, stream.counted), stream
