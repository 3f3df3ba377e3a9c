"""One candidate on one answer, beside plain decoding's on the same: everything that a figure is made of, and nothing pooled yet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from draftsmith.eval.machine import forget_peak, peak_bytes
from draftsmith.recipes import Prompt
from draftsmith.specdec import Drafter, Generation, Sampling
from draftsmith.specdec.audit import first_difference
from draftsmith.specdec.result import Written


class Arm(NamedTuple):
    """A candidate: what it is called, its drafter (None: plain decoding once more), how many tokens it drafts a round (or "adaptive")."""

    name: str
    drafter: Drafter | None
    k: int | str


AGAIN = Arm("plain decoding again", None, 0)  # against plain decoding it shows what the clock alone makes of a ratio


@dataclass(frozen=True)
class Measurement:
    """One candidate on one answer. Lengths are a number a target call, the prefill first; ms are means of the calls behind it;
    seconds include it, and are the row's equal share where `rows` prompts were decoded together."""

    drafter: str
    k: int | str
    temperature: float
    batch: int  # asked for; `rows` were there
    category: str
    prompt: str
    new_tokens: int
    seconds: float
    baseline_tokens: int
    baseline_seconds: float
    accepted_lengths: tuple[int, ...]
    drafted_lengths: tuple[int, ...]
    equal: int  # answers that equal plain decoding's, token for token, of `compared`; compared at temperature 0 only
    compared: int
    gaps: tuple[float, ...]  # nats between the target's two best where an answer first differs from plain decoding's; () if none
    draft_ms: float  # a drafted token; of an answer in which nothing was drafted, all the time spent on looking
    target_ms: float  # a verifying call of the target
    baseline_ms: float  # a one-token call of the target
    prompts: str = ""  # the file
    turn: int = 0
    rows: int = 1
    group: str = ""  # the first prompt of those decoded together: rows share a clock, so it is the unit of an interval
    draft_seconds: float = 0.0  # shares, as `seconds` are: drafting, the target's calls behind the prefill, and that
    target_seconds: float = 0.0
    prefill_seconds: float = 0.0
    baseline_prefill_seconds: float = 0.0
    first_seconds: float = 0.0  # from the call to the row's first token and to its last, by the clock on the wall
    baseline_first_seconds: float = 0.0
    last_seconds: float = 0.0
    baseline_last_seconds: float = 0.0
    peak_bytes: int = 0  # the most memory held during the call, of the process or the GPU; 0: unknown
    baseline_peak_bytes: int = 0
    limited: int = 0  # did it stop at the limit of new tokens?

    @property
    def unit(self) -> str:
        return self.group or self.prompt


def read_measurement(line: dict[str, Any]) -> Measurement:
    """A measurement as json gave it back."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in line.items()}
    return Measurement(**fields)


@dataclass
class Watched:
    """A call of `generate` with what a client of it would see: when each row's tokens came, and who wrote them."""

    rows: int
    generation: Generation = field(default_factory=lambda: Generation([], []))
    peak: int = 0

    def __post_init__(self) -> None:
        self.first, self.last = [0.0] * self.rows, [0.0] * self.rows
        self.written: list[list[Written]] = [[] for _ in range(self.rows)]

    def run(self, call: Any, device: Any) -> Watched:
        """`call` is `generate` but for `on_tokens`."""
        known = forget_peak(device)
        self._began = time.perf_counter()
        self.generation = call(on_tokens=self._heard)
        self.peak = peak_bytes(device) if known else 0
        return self

    def _heard(self, written: Written) -> None:
        row, now = written.row, time.perf_counter() - self._began
        if not self.written[row]:
            self.first[row] = now
        self.last[row] = now
        self.written[row].append(written)


def measurement(
    arm: Arm, prompt: Prompt, turn: int, row: int, group: str, ids: list[int], plain: Watched, run: Watched,
    how: Sampling, batch: int, prompts: str, target: PreTrainedModel,
) -> Measurement:  # fmt: skip
    """What `run` was on one of its rows, beside `plain` on the same."""
    ours, theirs, rows = run.generation, plain.generation, run.rows
    rounds, greedy = ours.rounds[row], how.temperature == 0
    same = ours.tokens[row] == theirs.tokens[row]
    drafted = sum(one for each in ours.rounds for one, _ in each)
    return Measurement(
        drafter=arm.name, k=arm.k, temperature=how.temperature, batch=batch, category=prompt.category, prompt=prompt.id,
        new_tokens=len(ours.tokens[row]), seconds=ours.seconds / rows,
        baseline_tokens=len(theirs.tokens[row]), baseline_seconds=theirs.seconds / rows,
        accepted_lengths=tuple(accepted for _, accepted in rounds), drafted_lengths=tuple(one for one, _ in rounds),
        equal=int(greedy and same), compared=int(greedy),
        gaps=_gaps(target, ids, ours.tokens[row], theirs.tokens[row], theirs.settings["vocabulary"]) if greedy and not same else (),
        draft_ms=1000 * ours.draft_seconds / max(drafted, 1), target_ms=_call_ms(ours), baseline_ms=_call_ms(theirs),
        prompts=prompts, turn=turn, rows=rows, group=group,
        draft_seconds=ours.draft_seconds / rows, target_seconds=ours.target_seconds / rows,
        prefill_seconds=ours.prefill_seconds / rows, baseline_prefill_seconds=theirs.prefill_seconds / rows,
        first_seconds=run.first[row], baseline_first_seconds=plain.first[row],
        last_seconds=run.last[row], baseline_last_seconds=plain.last[row],
        peak_bytes=run.peak, baseline_peak_bytes=plain.peak, limited=int(not theirs.finished[row]),
    )  # fmt: skip


def _gaps(target: PreTrainedModel, ids: list[int], ours: list[int], theirs: list[int], vocabulary: int) -> tuple[float, ...]:
    where = first_difference(target, ids, ours, theirs, vocabulary)
    return (where[1],) if where else ()


def _call_ms(out: Generation) -> float:
    """Of the calls behind the prefill; the longest row took part in all of them."""
    return 1000 * out.target_seconds / max(max(map(len, out.rounds)) - 1, 1)
