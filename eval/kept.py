"""What an evaluation has measured so far, a line an answer: a kill loses one answer, and figures of another setting are never mixed in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.eval.measurement import Measurement, read_measurement
from draftsmith.eval.prediction.costs import Clocks, cost_of
from draftsmith.eval.prediction.forced import Forced
from draftsmith.eval.prediction.predicted import Rounds
from draftsmith.eval.prompts import digest
from draftsmith.recipes import Prompt
from draftsmith.recipes.files import append_lines, appended

Pieces = list[tuple[str, str]]  # text, and who wrote it: draft or target


class Part(NamedTuple):
    """What is reported apart."""

    prompts: str
    temperature: float
    batch: int


class Done(NamedTuple):
    """One turn of prompts that were decoded together, with all that was found on it."""

    part: Part
    group: tuple[str, ...]
    turn: int
    digest: str
    sitting: str  # clocks of two sittings differ; those of one line never do
    said: list[str]
    measured: list[Measurement]
    forced: list[dict[str, Forced]]  # of each row, by drafter
    pieces: dict[str, dict[str, Pieces]]  # of the prompts that are shown, by candidate
    notes: dict[str, list[str]]  # what the decoder warned of, by candidate
    seconds: dict[str, float]  # decoding, teacher_forced, all


@dataclass
class Kept:
    """The file, and what in it was measured with the same `fingerprint`; the lines of others stay where they are."""

    path: Path
    fingerprint: str
    about: dict[str, Any] = field(default_factory=dict)  # what only a loaded model tells
    clocks: dict[Part, tuple[Clocks, float]] = field(default_factory=dict)  # and how long clocking took
    done: dict[tuple[Part, tuple[str, ...], int], Done] = field(default_factory=dict)

    def know(self, about: dict[str, Any]) -> None:
        self.about = about
        self._add({"about": about})

    def clock(self, part: Part, clocks: Clocks, seconds: float) -> None:
        self.clocks[part] = clocks, seconds
        costs = {name: one._asdict() for name, one in clocks.costs.items()}
        self._add({"clocks": {"part": part, "step": clocks.step, "prefill": clocks.prefill, "costs": costs, "seconds": seconds}})

    def add(self, done: Done) -> None:
        self.done[done.part, done.group, done.turn] = done
        line = done._asdict() | {"measured": [asdict(one) for one in done.measured]}
        self._add({"answer": line | {"forced": [{name: _written(one) for name, one in row.items()} for row in done.forced]}})

    def find(self, part: Part, group: Sequence[Prompt], turn: int) -> Done | None:
        """What was measured of these very prompts; a changed text is another."""
        found = self.done.get((part, tuple(one.id for one in group), turn))
        return found if found is not None and found.digest == digest(group) else None

    def _add(self, line: dict[str, Any]) -> None:
        append_lines(self.path, [json.dumps({"fingerprint": self.fingerprint, **line})])


def fingerprint_of(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def read_kept(path: Path, fingerprint: str) -> Kept:
    """What earlier calls measured so."""
    kept = Kept(path, fingerprint)
    for number, text in enumerate(appended(path), 1):
        try:
            line = json.loads(text)
            if line["fingerprint"] != fingerprint:
                continue
            if "about" in line:
                kept.about = line["about"]
            elif "clocks" in line:
                one = line["clocks"]
                costs = {name: cost_of(cost) for name, cost in one["costs"].items()}
                kept.clocks[Part(*one["part"])] = Clocks(one["step"], one["prefill"], costs), one["seconds"]
            else:
                done = _done(line["answer"])
                kept.done[done.part, done.group, done.turn] = done
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}, is none that an evaluation wrote ({error}); remove the file to measure anew"
            ) from error
    return kept


def _done(line: dict[str, Any]) -> Done:
    forced = [{name: _read(one) for name, one in row.items()} for row in line["forced"]]
    measured = [read_measurement(one) for one in line["measured"]]
    ours = {"part": Part(*line["part"]), "group": tuple(line["group"]), "measured": measured, "forced": forced}
    return Done(**{**line, **ours})


def _written(one: Forced) -> dict[str, Any]:
    return one._asdict() | {"rounds": {str(k): list(each) for k, each in one.rounds.items()}}


def _read(line: dict[str, Any]) -> Forced:
    return Forced(line["overlap"], line["positions"], {int(k): Rounds(*each) for k, each in line["rounds"].items()})
