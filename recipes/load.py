"""From a yaml file and overrides to a recipe: everything that is wrong with it is said at once, each with its path."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, Tag, ValidationError

from draftsmith.recipes.core_yaml import Core
from draftsmith.recipes.paths import find_recipe
from draftsmith.recipes.schema import Recipe


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a yaml file (or one of ours by name) with `a.b=c` overrides; ValueError lists everything wrong with it."""
    path = find_recipe(name)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=Core)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, found {type(tree).__name__}")
    problems = [problem for one in overrides if (problem := _override(tree, one))]
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(one) for one in error.errors()]
    if problems:
        raise ValueError(f"{path}: {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n  " + "\n  ".join(problems))
    return recipe


def _override(tree: dict[str, Any], text: str) -> str | None:
    """Set `a.b=c` in the tree; c is read as yaml. What is wrong with it, or None."""
    path, equals, value = text.removeprefix("--").partition("=")
    if not equals or not path:
        return f"{text!r} is not an override; write section.key=value"
    *sections, key = path.split(".")
    try:
        parsed = yaml.load(value, Loader=Core)
    except yaml.YAMLError as error:
        return f"{path}: {value!r} cannot be read: {str(error).splitlines()[0]}"
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            return f"{path}: {section} holds a value, not a section"
    tree[key] = parsed
    return None


def _explain(error: Any) -> str:
    """One problem in one line: path, what is wrong, what was found, the nearest name."""
    parts, known = _place(error["loc"])
    path = ".".join(map(str, parts))
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(parts[-1]), known, n=1)
        return f"{path}: no such key" + (f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(known)}")
    if error["type"] == "missing":
        return f"{path}: is needed"
    if error["type"] == "union_tag_invalid":
        return f"{path}.kind: is one of {error['ctx']['expected_tags']}, found {error['ctx']['tag']!r}"
    message = error["msg"][0].lower() + error["msg"][1:]
    if not parts:  # of the recipe as a whole: it names the keys itself
        return message
    found = "" if parts[-1] == "url" else f", found {error['input']!r}"  # a url may hold a secret
    return f"{path}: {message}{found}"


def _place(location: tuple[str | int, ...]) -> tuple[list[str | int], list[str]]:
    """Where in the yaml an error is (pydantic names the member of a union too, which the yaml does not), and the keys known there."""
    kind: Any = Recipe
    parts: list[str | int] = []
    known: list[str] = []
    for part in location:
        if part in (members := _members(kind)):
            kind = members[str(part)]
            continue
        parts.append(part)
        model = next((one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if isinstance(part, str):
            known = list(model.model_fields) if model else []
            kind = model.model_fields[part].annotation if model and part in known else None
    return parts, known


def _members(kind: Any) -> dict[str, Any]:
    """The members of a union by their tags, unions within it included."""
    found: dict[str, Any] = {}
    for one in get_args(kind):
        marks = getattr(one, "__metadata__", ())
        found |= {str(mark.tag): one.__origin__ for mark in marks if isinstance(mark, Tag)}
        found |= _members(one.__origin__) if marks else {}
    return found
