"""What a choice among settings is worth on other prompts than those it was made on: the best of many flatters itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from draftsmith.eval.measurement import Measurement
from draftsmith.eval.metrics import by_unit

T = TypeVar("T", bound=Hashable)  # a setting


def chosen_elsewhere(measured: Mapping[T, Sequence[Measurement]]) -> list[Measurement]:
    """On each prompt the measurements of the setting that was fastest on all the others; on one prompt alone, the fastest's.

    Plain decoding ran on the same prompts for all, so the setting of the most tokens a second is that of the highest speed-up.
    """
    units = list(dict.fromkeys(one.unit for one in next(iter(measured.values()))))
    sums = {setting: by_unit(its, lambda m: (m.new_tokens, m.seconds)) for setting, its in measured.items()}
    whole = {setting: tuple(map(sum, zip(*each.values(), strict=True))) for setting, each in sums.items()}

    def speed(setting: T, but: str) -> float:
        (tokens, seconds), (less, shorter) = whole[setting], sums[setting][but] if len(units) > 1 else (0.0, 0.0)
        return (tokens - less) / (seconds - shorter)

    best = {unit: max(measured, key=lambda setting: speed(setting, unit)) for unit in units}
    return [one for unit in units for one in measured[best[unit]] if one.unit == unit]
