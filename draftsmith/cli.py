"""The `draftsmith` command: arguments in, one clear error out; everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import draftsmith
from draftsmith.recipes import Recipe, load_recipe

ERRORS = (ValueError, OSError, RuntimeError, FloatingPointError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it did what was asked, 2 on an error that says what to do, 130 when interrupted."""
    parser = _parser()
    chosen, rest = parser.parse_known_args(argv)
    stray = [one for one in rest if "=" not in one]
    if stray:
        parser.error(f"{stray[0]!r} is neither an option nor an override of the recipe (section.key=value)")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn when a process forks after their use
    try:
        return int(chosen.run(load_recipe(chosen.recipe, rest), chosen) or 0)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it was", file=sys.stderr)
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
    for name, (run, what) in COMMANDS.items():
        one = commands.add_parser(
            name, help=what, description=what, epilog="Any value of the recipe can be set behind it: train.epochs=2"
        )
        one.add_argument("recipe", help="a yaml file, or the name of a recipe that ships with Draftsmith")
        one.set_defaults(run=run)
        if name == "prepare":
            one.add_argument("--out", type=Path, help="where the answers go (default: answers.jsonl in the run folder)")
        if name == "export":
            one.add_argument("--format", help="instead of the recipe's export.format")
            one.add_argument("--force", action="store_true", help="replace an export that is there")
    return parser


def _validate(recipe: Recipe, chosen: argparse.Namespace) -> None:
    print(recipe.dump(), end="")


def _prepare(recipe: Recipe, chosen: argparse.Namespace) -> None:
    from draftsmith.recipes import read_prompts

    prompts = read_prompts(recipe.data.prompts)  # before a model is loaded
    from draftsmith.specdec.models import load
    from draftsmith.specdec.places import revision
    from draftsmith.train.prepare import manifest, prepare

    out = chosen.out or recipe.folder / "answers.jsonl"
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it, or give another --out, to answer the prompts anew")
    target, tokenizer = load(recipe.target.model, recipe.target.dtype)
    about = manifest(recipe.data, prompts, recipe.target.model, revision(recipe.target.model), tokenizer, recipe.seed)
    prepare(out, about, recipe.data, prompts, target, tokenizer)


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


def _run(recipe: Recipe, chosen: argparse.Namespace) -> None:
    started = time.monotonic()
    from draftsmith.recipes import read_prompts

    read_prompts(recipe.eval.prompts)  # not only after the training
    from draftsmith.eval.run import run_eval
    from draftsmith.train.export import EXPORTS
    from draftsmith.train.run import run_training

    run_training(recipe)
    run_eval(recipe)
    EXPORTS[recipe.export.format](recipe, True)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(f"all of it took {minutes} min {seconds} s; everything is in {recipe.folder}")


COMMANDS = {
    "run": (_run, "train, evaluate and export, going on where an earlier call stopped"),
    "prepare": (_prepare, "let the target answer the training prompts"),
    "train": (_train, "train the draft of a recipe"),
    "eval": (_eval, "measure the candidates of a recipe beside plain decoding"),
    "export": (_export, "write the best draft for the engine that will serve it"),
    "validate": (_validate, "check a recipe and print it with every default filled in"),
}

if __name__ == "__main__":
    raise SystemExit(main())
