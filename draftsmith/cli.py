"""The `draftsmith` command: arguments in, one clear error out."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import draftsmith
from draftsmith.commands import COMMANDS
from draftsmith.recipes import load_recipe
from draftsmith.recipes.progress import give_back
from draftsmith.train.interrupt import RESUME_ME, Interrupted, Signals  # torch-free

ERRORS = (ValueError, OSError, RuntimeError, FloatingPointError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it did what was asked, 2 on an error that says what to do, 75 when a signal ended it and the same command
    goes on, 130 when anything else was interrupted."""
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
        with Signals(steps=False) if command.goes_on else contextlib.nullcontext():
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
    finally:
        give_back()  # whoever called may go on, on a terminal without a cursor and with a thread that draws


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


if __name__ == "__main__":
    raise SystemExit(main())
