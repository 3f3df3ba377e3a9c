"""The `draftsmith` command: arguments in, one clear error out; everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import draftsmith
from draftsmith.recipes import Recipe, load_recipe
from draftsmith.train.interrupt import RESUME_ME, Interrupted  # torch-free

ERRORS = (ValueError, OSError, RuntimeError, FloatingPointError, ImportError)


class Command(NamedTuple):
    """What a command does with its arguments; one that takes a recipe gets it loaded, with the overrides behind it."""

    run: Callable[[Any, argparse.Namespace], int | None]
    what: str
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    recipe: bool = True  # False: it takes none, or may be given one and says so in its options
    goes_on: bool = True  # a second call goes on where the first was interrupted


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it did what was asked, 2 on an error that says what to do, 75 when a training run ended by a signal can be
    gone on with, 130 when anything else was interrupted."""
    parser = _parser()
    chosen, rest = parser.parse_known_args(argv)
    command = COMMANDS[chosen.command]
    recipe = getattr(chosen, "recipe", None)
    if recipe and (stray := [one for one in rest if "=" not in one]):
        parser.error(f"{stray[0]!r} is neither an option nor an override of the recipe (section.key=value)")
    if rest and not recipe:
        parser.error(f"{rest[0]!r} is no option of {chosen.command}; a text of several words goes between quotes")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn when a process forks after their use
    try:
        return int(command.run(load_recipe(recipe, rest) if recipe else None, chosen) or 0)
    except Interrupted as asked:
        print(f"draftsmith {chosen.command}: {asked}", file=sys.stderr)
        return RESUME_ME
    except KeyboardInterrupt:
        print("\ninterrupted" + ("; the same command goes on where it was" if command.goes_on else ""), file=sys.stderr)
        return 130
    except ERRORS as error:
        if os.environ.get("DRAFTSMITH_TRACEBACK"):
            raise
        print(f"draftsmith {chosen.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="draftsmith", description=draftsmith.__doc__)
    parser.add_argument("--version", action="version", version=f"draftsmith {draftsmith.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        hint = "Any value of the recipe can be set behind it: train.epochs=2" if command.recipe else None
        one = commands.add_parser(name, help=command.what, description=command.what, epilog=hint)
        if command.recipe:
            one.add_argument("recipe", help="a yaml file, or the name of a recipe that ships with Draftsmith")
        command.options(one)
    return parser


def _prepare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="where the answers go (default: answers.jsonl in the run folder)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N rows with what of them is scored")


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", help="instead of the recipe's export.format")
    parser.add_argument("--force", action="store_true", help="replace an export that is there")


def _push_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="what `draftsmith export` wrote, such as runs/NAME/export/transformers")
    parser.add_argument("repository", metavar="OWNER/NAME", help="where to; it is made where there is none")
    parser.add_argument("--public", action="store_true", help="for all to see, if it is made now")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, argparse.SUPPRESS  # what is not said keeps the default of `show.Asked`
    add("prompt", help="the text to answer; - reads stdin")
    add("--target", required=True, metavar="NAME", help="a hub id, a folder, a .gguf file or package:NAME/FILE")
    add(
        "--draft", default=default, metavar="NAME", help="who drafts: a model as for --target, exit:LAYER, ngram; without it nobody"
    )
    add("--ngram", default=default, action="store_true", help="draft what followed the same words before; --draft speaks elsewhere")
    add("-k", default=default, type=int, metavar="N", help="tokens drafted for a call of the target, 4")
    add("--adaptive", default=default, action="store_true", help="draft up to k tokens, as many as pay")
    add("--max-new-tokens", default=default, type=int, metavar="N", help="128")
    add("--temperature", default=default, type=float, metavar="T", help="0 is greedy, and the default")
    add("--top-k", default=default, type=int, metavar="N", help="0 is off, and the default")
    add("--top-p", default=default, type=float, metavar="P", help="1 is off, and the default")
    add("--seed", default=default, type=int, metavar="N", help="0")
    add("--system", default=default, metavar="TEXT", help="the system's turn of the chat")
    add("--raw", default=default, action="store_true", help="continue the prompt as it is, without the chat template")
    add("--stop", default=default, action="append", metavar="STRING", help="a text that ends the answer; may be given again")
    add("--threads", default=default, type=int, metavar="N", help="of the processor, for torch")
    add("--dtype", default=default, metavar="NAME", help="fp32 (the default), bf16 or fp16")
    add("--plain", default=default, action="store_true", help="no colours and no live count, as into a pipe")
    add("--compare", default=default, action="store_true", help="decode without the draft too, and say what it was worth")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, argparse.SUPPRESS  # what is not said keeps the default of `plan.Asked`
    add("--target", required=True, metavar="NAME", help="a hub id (only its config is fetched), a folder, a config.json, a .gguf")
    add("--draft", required=True, metavar="NAME", help="the same; or exit:E, layers:N of the target, ngram, cost:C of its call")
    add("--device", required=True, metavar="NAME", help="dgx-spark, h200 ... or a .yaml file of your own (docs/plan.md)")
    add(
        "--alpha", default=default, nargs="+", metavar="A", help="acceptance; 0.8,0.7 by position; the verdict is at the middle one"
    )
    add("--k", default=default, type=int, metavar="N", help="tokens drafted for a call; the best of 1 to 16")
    add("--context", default=default, type=int, metavar="N", help="tokens of a sequence, 4096")
    add("--batch", default=default, type=int, metavar="N", help="sequences at a time, 1")
    add("--dtype", default=default, metavar="NAME", help="of the weights: fp32, bf16, fp16, fp8, int4; the config's")
    add("--draft-dtype", default=default, metavar="NAME", help="of the draft's weights; the target's")
    add("--draft-vocabulary", default=default, type=int, metavar="N", help="ids that the draft's head is trimmed to")
    add("--engine", default=default, metavar="NAME", help="served (launches captured in graphs, the default) or eager")
    add("--processes", default=default, type=int, metavar="N", help="of a training run that is spread, 8")
    add("--tokens", default=default, type=int, metavar="N", help="of a micro-batch of training, 4096")
    add("--json", action="store_true", help="print facts, in bytes and seconds, instead of tables")


def _sweep_options(parser: argparse.ArgumentParser) -> None:
    add, default = (
        parser.add_argument,
        argparse.SUPPRESS,
    )  # what is not said keeps the recipe's value, or the default of `sweep.Asked`
    add("recipe", nargs="?", help="whose target and evaluation are meant; the options below go before its values")
    add("--target", default=default, metavar="NAME", help="a hub id, a folder, a .gguf file or package:NAME/FILE")
    add("--prompts", default=default, metavar="FILE", help="held-out prompts: JSONL with prompt, turns or messages")
    add(
        "--drafters", default=default, nargs="+", metavar="NAME",
        help="exit:3,6,9 (three exits), FOLDER:3,6,9 (trained ones), a folder, ngram ...; exits through the first half",
    )  # fmt: skip
    add("--k", default=default, nargs="+", type=int, metavar="N", help="tokens drafted a round; 1 2 3 4 6 8")
    add("--per-kind", default=default, type=int, metavar="N", help="prompts of each kind, the first ones; 0 takes all")
    add("--max-new-tokens", default=default, type=int, metavar="N", help="48")
    add("--temperature", default=default, type=float, metavar="T", help="0 is greedy, and the default")
    add("--dtype", default=default, metavar="NAME", help="fp32 (the default), bf16 or fp16")
    add(
        "--decoding",
        default=default,
        metavar="HOW",
        help="as_loaded (the default), or prepared: fp32 on a CPU made fast for few tokens",
    )
    add("--threads", default=default, type=int, metavar="N", help="of the processor, for torch; 1")
    add("--seed", default=default, type=int, metavar="N", help="0")
    add("--out", default=default, metavar="FOLDER", help="sweep in the run folder, or here")


def _compat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="the model whose text is wanted: a hub id, a folder, a .gguf file or package:NAME/FILE"
    )
    parser.add_argument("draft", metavar="DRAFT", help="the model that is to draft for it")


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports", nargs="+", metavar="REPORT", help="run folders, or report.json files; the others are held against the first"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it as a page too, such as compare.html")


def _validate(recipe: Recipe, chosen: argparse.Namespace) -> None:
    print(recipe.dump(), end="")


def _prepare(recipe: Recipe, chosen: argparse.Namespace) -> None:
    from draftsmith.recipes import read_prompts
    from draftsmith.recipes.paths import find

    chats = recipe.data.format == "messages"
    prompts = [] if chats else read_prompts(recipe.data.prompts)  # before a model is loaded
    from draftsmith.specdec.models import load, load_tokenizer
    from draftsmith.specdec.places import revision
    from draftsmith.train.data.chats import read_chats
    from draftsmith.train.data.prepare import manifest, prepare, prepare_served, read_answers, served_revision, served_target
    from draftsmith.train.data.show_row import show_rows
    from draftsmith.train.rows import form

    out = chosen.out or recipe.folder / "answers.jsonl"
    if chats and not chosen.show:
        raise ValueError(
            "data.format is messages: these chats hold their answers already; --show 1 prints one as it will be learned"
        )
    if not chats and out.exists() and not chosen.show:
        raise FileExistsError(f"{out} exists; remove it, or give another --out, to answer the prompts anew")
    if (server := recipe.server) is not None and not chats and not out.exists():
        tokenizer = load_tokenizer(recipe.target.model)
        about = manifest(recipe.data, prompts, server.model, served_revision(server.model, server.revision), tokenizer, recipe.seed)
        prepare_served(out, about, recipe.data, prompts, served_target(server), recipe.target.model, tokenizer)
        return
    target, tokenizer = load(recipe.target.model, recipe.target.dtype)
    if chats:
        rows = read_chats(find(recipe.data.prompts))
    else:
        about = manifest(recipe.data, prompts, recipe.target.model, revision(recipe.target.model), tokenizer, recipe.seed)
        if out.exists():
            rows = read_answers(out, {what: value for what, value in about.items() if what != "target"})
        else:
            rows = prepare(out, about, recipe.data, prompts, target, tokenizer)
    show_rows(rows, tokenizer, form(recipe, target, tokenizer), chosen.show)


def _train(recipe: Recipe, chosen: argparse.Namespace) -> None:
    from draftsmith.train.run import run_training

    run_training(recipe)


def _eval(recipe: Recipe, chosen: argparse.Namespace) -> None:
    from draftsmith.eval.run import run_eval

    run_eval(recipe)


def _export(recipe: Recipe, chosen: argparse.Namespace) -> None:
    from draftsmith.specdec.models import pick
    from draftsmith.train.export import EXPORTS

    pick(EXPORTS, chosen.format or recipe.export.format, "the format of an export")(recipe, chosen.force)


def _push(recipe: None, chosen: argparse.Namespace) -> None:
    from draftsmith.train.export.push import push

    print(f"pushed {chosen.folder}: {push(chosen.folder, chosen.repository, chosen.public)}")


def _run(recipe: Recipe, chosen: argparse.Namespace) -> None:
    started = time.monotonic()
    from draftsmith.recipes import read_prompts

    for prompts in recipe.eval.files:
        read_prompts(prompts)  # not only after the training
    from draftsmith.eval.run import run_eval
    from draftsmith.train.export import EXPORTS, int8
    from draftsmith.train.run import run_training

    int8.asked(recipe, recipe.export.format)  # refused now, and not after the training
    run_training(recipe)
    run_eval(recipe)
    EXPORTS[recipe.export.format](recipe, True)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"all of it took {minutes} min {seconds} s; everything is in {recipe.folder}")


def _generate(recipe: None, chosen: argparse.Namespace) -> int:
    from draftsmith.specdec.show import Asked, show

    return show(Asked(**{name: value for name, value in vars(chosen).items() if name != "command"}))


def _plan(recipe: None, chosen: argparse.Namespace) -> None:
    from draftsmith.eval.plan import Asked, plan
    from draftsmith.eval.plan.page import show

    asked = {name: value for name, value in vars(chosen).items() if name not in ("command", "json")}
    if "alpha" in asked:
        asked["alpha"] = tuple(asked["alpha"])
    found = plan(Asked(**asked))
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


def _sweep(recipe: Recipe | None, chosen: argparse.Namespace) -> None:
    from draftsmith.eval.sweep import run_sweep
    from draftsmith.eval.sweep.asked import asked_of

    said = {name: value for name, value in vars(chosen).items() if name not in ("command", "recipe")}
    run_sweep(asked_of(recipe, said))


def _compat(recipe: None, chosen: argparse.Namespace) -> int:
    from draftsmith.specdec.compat_page import show_compat

    return show_compat(chosen.target, chosen.draft)


def _compare(recipe: None, chosen: argparse.Namespace) -> None:
    from draftsmith.eval.compare import show_comparison

    show_comparison(chosen.reports, chosen.out)


COMMANDS = {
    "run": Command(_run, "train, evaluate and export, going on where an earlier call stopped"),
    "prepare": Command(_prepare, "let the target answer the training prompts", _prepare_options),
    "train": Command(_train, "train the draft of a recipe"),
    "eval": Command(_eval, "measure the candidates of a recipe beside plain decoding"),
    "export": Command(_export, "write the best draft for the engine that will serve it", _export_options),
    "push": Command(_push, "put an exported draft on a model hub", _push_options, False),
    "validate": Command(_validate, "check a recipe and print it with every default filled in"),
    "generate": Command(
        _generate, "answer one prompt and show who wrote what: the draft or the target", _generate_options, False, False
    ),
    "plan": Command(_plan, "say what a pair will be worth on a device, from two configs alone", _plan_options, False, False),
    "sweep": Command(
        _sweep, "measure exit layer x block length on held-out prompts and recommend one setting", _sweep_options, False
    ),
    "compare": Command(_compare, "put the reports of several runs side by side", _compare_options, False, False),
    "compat": Command(
        _compat,
        "say how two models' vocabularies relate and which engines pair them; 1 where Draftsmith cannot",
        _compat_options,
        False,
        False,
    ),
}

if __name__ == "__main__":
    raise SystemExit(main())
