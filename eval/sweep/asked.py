"""What a sweep is asked for; everything that can be wrong with it is said before a model is loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.eval.candidates import folder_of, place_of
from draftsmith.eval.plan.sizes import read_config
from draftsmith.recipes import Recipe
from draftsmith.specdec.places import locate

SHARES = (1 / 10, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the layers: where exits are looked for when none is named
LAYERED = re.compile(r"(.*):(\d+(?:,\d+)*)")  # exit:3,6 or FOLDER:3,6


@dataclass(frozen=True)
class Asked:
    """The command's arguments. A drafter is any name that `load_drafter` takes; `exit:3,6,9` and `FOLDER:3,6,9` are three each."""

    target: str
    prompts: str
    drafters: tuple[str, ...] = ()  # () is exits through the first half of the target
    k: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    per_kind: int = 0
    max_new_tokens: int = 48
    dtype: str = "fp32"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    decoding: str = "as_loaded"
    threads: int = 1
    seed: int = 0
    bootstrap: int = 2000
    out: str = "sweep"


def asked_of(recipe: Recipe | None, said: Mapping[str, Any]) -> Asked:
    """What was said, over what the recipe says of target and evaluation. ValueError where neither names target and prompts."""
    known: dict[str, Any] = {}
    if recipe is not None:
        settings = recipe.eval
        known = {
            "target": recipe.target.model, "dtype": recipe.target.dtype, "per_kind": settings.per_kind,
            "max_new_tokens": settings.max_new_tokens, "decoding": settings.decoding, "threads": settings.threads,
            "seed": settings.seed, "bootstrap": settings.bootstrap, "out": str(recipe.folder / "sweep"), **settings.sampling.model_dump(),
        }  # fmt: skip
        known |= {"prompts": settings.files[0]} if len(settings.files) == 1 else {}
        named = tuple(one.drafter for one in settings.candidates)
        own = tuple(one for one in named if re.fullmatch(r"run:(best|latest):\d+", one))
        known |= {"drafters": own} if own else {}
    known |= said
    if missing := [f"--{name}" for name in ("target", "prompts") if name not in known]:
        raise ValueError(f"a sweep needs a recipe, or --target and --prompts; missing: {' and '.join(missing)}")
    drafters = [place_of(recipe.folder, one) if recipe is not None else one for one in every_layer(known.get("drafters", ()))]
    asked = Asked(**{**known, "drafters": tuple(drafters), "k": tuple(known.get("k", Asked.k))})
    _check_numbers(asked)
    layers = int(read_config(asked.target).get_text_config().num_hidden_layers)
    if not asked.drafters:
        spread = sorted({max(1, round(layers * share)) for share in SHARES})
        asked = replace(asked, drafters=tuple(f"exit:{one}" for one in spread))
    for name in asked.drafters:
        _check_name(name, layers)
    return asked


def every_layer(names: tuple[str, ...]) -> list[str]:
    """Each name once, `exit:3,6` as `exit:3` and `exit:6`; what exists under its whole name is left whole."""
    out: list[str] = []
    for name in names:
        many = None if Path(name).exists() else LAYERED.fullmatch(name)
        out += [f"{many[1]}:{layer}" for layer in many[2].split(",")] if many else [name]
    return list(dict.fromkeys(out))


def _check_numbers(asked: Asked) -> None:
    for what, least, values in (
        ("k", 1, asked.k), ("per-kind", 0, (asked.per_kind,)), ("max-new-tokens", 2, (asked.max_new_tokens,)), ("threads", 1, (asked.threads,)),
    ):  # fmt: skip
        if not values or min(values) < least:
            raise ValueError(f"--{what} {' '.join(map(str, values))} asked; each is at least {least}")
    if len(set(asked.k)) < len(asked.k):
        raise ValueError(f"--k {' '.join(map(str, asked.k))} asked; name each block length once")
    if asked.decoding not in ("as_loaded", "prepared"):
        raise ValueError(f"--decoding {asked.decoding} asked; it is as_loaded or prepared")


def _check_name(name: str, layers: int) -> None:
    """ValueError or FileNotFoundError for a drafter that cannot be; a hub id is only known to be wrong when it is loaded."""
    if Path(name).exists():
        return
    for one in name.split("+") if name.startswith("ngram") else [name]:
        word, colon, number = one.partition(":")
        if word == "exit" and not (number.isdigit() and 1 <= int(number) <= layers):
            raise ValueError(f"{name}: the target has layers 1..{layers}; name some of them, as in exit:{max(1, layers // 4)}")
        if word == "ngram" and colon and not number.isdigit():
            raise ValueError(f"{name}: ngram takes a whole number, as in ngram:4")
        if word not in ("exit", "ngram"):
            folder = folder_of(one)
            near = difflib.get_close_matches(word, ("ngram", "exit"), n=1)
            if locate(folder) is None and (near or folder != one):
                raise FileNotFoundError(
                    f"{name}: no folder {folder} here" + (f"; did you mean {near[0]}?" if near else "; train its exits first")
                )
