"""From a recipe's data to rows and the order in which they are seen: answers made or found, chats read, streams opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.distill.batch import Example
from draftsmith.distill.rollout import ends
from draftsmith.recipes import Recipe, read_prompts
from draftsmith.recipes.paths import find
from draftsmith.recipes.schema import CheckpointDraft
from draftsmith.recipes.seen import write_seen
from draftsmith.specdec.models import eos_ids, load, load_tokenizer
from draftsmith.specdec.places import revision as revision_of
from draftsmith.train.data.all_rows import fingerprint
from draftsmith.train.data.chats import Chat, Form, first_asked, of_answers, read_chats, reader
from draftsmith.train.data.plan import Order, Plan, Rows, to_rows
from draftsmith.train.data.prepare import identity, manifest, prepare, prepare_served, read_answers, served_revision, served_target
from draftsmith.train.data.show_row import show_rows
from draftsmith.train.data.stream import BUILDERS, Stream

ANSWERS = "answers.jsonl"  # in the run folder, where the recipe names no file
HELD_OUT = 512  # rows of a stream that are kept back to judge by


def answers(recipe: Recipe, target: Any, tokenizer: Any, revision: str) -> list[Chat]:
    """The target's answers to the training prompts, a chat an answered prompt: of the files that the recipe names, or made in the run
    folder. A prompt that several files answer is as many chats."""
    name, revision = _source(recipe, revision)
    if files := [find(one) for one in recipe.data.answer_files]:
        return [chat for path in files for chat in of_answers(read_answers(path, identity(revision, tokenizer)))]
    return of_answers(_answers_in(recipe.folder / ANSWERS, recipe, target, tokenizer, name, revision))


def run_prepare(recipe: Recipe, out: Path | None, show: int) -> None:
    """`draftsmith prepare`: the answers are made, and refused where they are there already; with `show` they are made or read, and so
    many rows printed as they will be learned."""
    data, path = recipe.data, out or recipe.folder / ANSWERS
    chats = data.format == "messages"
    if chats and not show:
        raise ValueError(
            "data.format is messages: these chats hold their answers already; --show 1 prints one as it will be learned"
        )
    if not chats and path.exists() and not show:
        raise FileExistsError(f"{path} exists; remove it, or give another --out, to answer the prompts anew")
    if recipe.server is not None and not chats:  # what a server says takes no weights here
        target, tokenizer = None, load_tokenizer(recipe.target.model)
    else:
        target, tokenizer = load(recipe.target.model, recipe.target.dtype)
    rows = read_chats(find(data.prompts)) if chats else _answers_in(path, recipe, target, tokenizer, *_source(recipe))
    show_rows(rows, tokenizer, form(recipe, target, tokenizer), show)


def _source(recipe: Recipe, revision: str = "") -> tuple[str, str]:
    """Whose answers the recipe learns from, and which version of it: the target's, or the served one's."""
    if (server := recipe.server) is not None:
        return server.model, served_revision(server.model, server.revision)
    return recipe.target.model, revision or revision_of(recipe.target.model)


def _answers_in(path: Path, recipe: Recipe, target: Any, tokenizer: Any, name: str, revision: str) -> list[dict[str, Any]]:
    """The answers to the recipe's prompts: those in `path`, or made and written there; a served target needs no `target` here."""
    data, server = recipe.data, recipe.server
    prompts = read_prompts(data.prompts)
    about = manifest(data, prompts, name, revision, tokenizer, recipe.seed)
    if path.is_file():
        del about["target"]  # its revision tells, not its name
        return read_answers(path, about)
    if server is not None:
        return prepare_served(path, about, data, prompts, served_target(server), recipe.target.model, tokenizer)
    return prepare(path, about, data, prompts, target, tokenizer)


def form(recipe: Recipe, target: Any, tokenizer: Any) -> Form:
    """How the recipe wants its rows made; of a target that is not loaded (None) the settings are read for the ids that end a text."""
    data = recipe.data
    stop = ends(recipe.target.model, tokenizer) if target is None else eos_ids(target, tokenizer)
    return Form(data.max_length, data.long, tuple(stop), data.words != "others")


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
