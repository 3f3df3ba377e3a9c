"""The losses that a recipe may name, checked without torch: the functions themselves are in distill."""

from __future__ import annotations

import difflib
import math
from typing import Annotated

from pydantic import AfterValidator

# What `train.loss` may name, and the parameter that may stand behind a colon. This file imports no torch, so the table is written
# twice: a test holds it against distill.losses.
LOSSES: dict[str, tuple[str, type[int] | type[float], float, float] | None] = {
    "forward_kl": None,
    "reverse_kl": None,
    "jsd": ("beta", float, 0, 1),
    "total_variation": None,
    "tvd_pp": None,
    "lk_alpha": None,
    "lk_lambda": ("eta", float, 0, math.inf),
    "ce_argmax": None,
    "ce_data": None,
    "hass": ("k", int, 0, math.inf),
}


def _known_loss(name: str) -> str:
    kind, colon, value = name.partition(":")
    if kind not in LOSSES:
        near = difflib.get_close_matches(kind, LOSSES, n=1)
        raise ValueError(f"no such loss; did you mean {near[0]}?" if near else f"no such loss; known are {', '.join(LOSSES)}")
    if not colon:
        return name
    if (parameter := LOSSES[kind]) is None:
        raise ValueError(f"{kind} takes no parameter; those that do are {', '.join(one for one, takes in LOSSES.items() if takes)}")
    what, read, low, high = parameter
    try:
        fits = low < read(value) < high
    except ValueError:
        fits = False
    if not fits:
        kind = "whole number" if read is int else "number"
        raise ValueError(f"{what} must be a {kind} above {low}" + (f" and below {high}" if high < math.inf else ""))
    return name


Loss = Annotated[str, AfterValidator(_known_loss)]
