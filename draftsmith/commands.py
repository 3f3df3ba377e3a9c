"""What each command does: everything heavy is imported by the command that needs it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from draftsmith import options
from draftsmith.recipes import Recipe


class Command(NamedTuple):
    """What a command does with its arguments; one that takes a recipe gets it loaded, with the overrides behind it."""

    run: Callable[[Any, argparse.Namespace], int | None]
    what: str
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    recipe: bool = True  # False: it takes none, or may be given one and says so in its options
    goes_on: bool = True  # a second call goes on where the first was interrupted


def _validate(recipe: Recipe, chosen: argparse.Namespace) -> None:
    print(recipe.dump(), end="")


def _prepare(recipe: Recipe, chosen: argparse.Namespace) -> None:
    from draftsmith.recipes import read_prompts

    if recipe.data.format != "messages":
        read_prompts(recipe.data.prompts)  # refused now, and not after torch is loaded
    from draftsmith.train.rows import run_prepare

    run_prepare(recipe, chosen.out, chosen.show)


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
    "prepare": Command(_prepare, "let the target answer the training prompts", options.prepare),
    "train": Command(_train, "train the draft of a recipe"),
    "eval": Command(_eval, "measure the candidates of a recipe beside plain decoding"),
    "export": Command(_export, "write the best draft for the engine that will serve it", options.export),
    "push": Command(_push, "put an exported draft on a model hub", options.push, False),
    "validate": Command(_validate, "check a recipe and print it with every default filled in"),
    "generate": Command(
        _generate, "answer one prompt and show who wrote what: the draft or the target", options.generate, False, False
    ),
    "plan": Command(_plan, "say what a pair will be worth on a device, from two configs alone", options.plan, False, False),
    "sweep": Command(
        _sweep, "measure exit layer x block length on held-out prompts and recommend one setting", options.sweep, False
    ),
    "compare": Command(_compare, "put the reports of several runs side by side", options.compare, False, False),
    "compat": Command(
        _compat,
        "say how two models' vocabularies relate and which engines pair them; 1 where Draftsmith cannot",
        options.compat,
        False,
        False,
    ),
}
