"""How many tokens to draft next. Whether a position is drafted may depend only on tokens before it, or the law is lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from draftsmith.specdec.budget import Budget
from draftsmith.specdec.chances import Chances, bucket
from draftsmith.specdec.costs import DEAR, Costs

KNOWS_NOTHING, A_MODEL = -1, 0  # evidence: nothing to propose, a model's own words, or the length of a looked-up text


class Round(NamedTuple):
    """One round over `len(drafted)` rows: `k` asked, `columns` fed to the target, and what it took in seconds."""

    k: int
    columns: int
    drafted: list[int]
    accepted: list[int]
    evidence: list[int]
    draft_seconds: float
    target_seconds: float


class Pace(Protocol):
    """Asked before every round; 0 is always allowed and means a plain step of the target.

    `sure` says that it drafts whatever the evidence: a model then reads the prompt with the target, not when its first draft is
    wanted, and every row is shown as a model's own words, since looking for more would cost time.
    """

    @property
    def sure(self) -> bool: ...

    def begin(self, prefill_seconds: float, tokens: int) -> None:
        """A new call of `generate`, whose target has read the prompts in so many seconds and will write so many tokens at most."""

    def next(self, evidence: list[int]) -> int:
        """How many tokens to draft, given what each row's drafter can rest on (see `Drafter.evidence`)."""

    def observe(self, round: Round) -> None: ...


@dataclass(frozen=True)
class Fixed:
    """Always the same k."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"k must be >= 0, found {self.k}")

    @property
    def sure(self) -> bool:
        return self.k > 0

    def begin(self, prefill_seconds: float, tokens: int) -> None:
        """A fixed pace learns nothing."""

    def next(self, evidence: list[int]) -> int:
        return self.k

    def observe(self, round: Round) -> None:
        """A fixed pace learns nothing."""


class Adaptive:
    """The k of 0..`k_max` with the most expected tokens a second, from the acceptance and the costs seen so far.

    S = tau / (k c + r(k+1)) with measured milliseconds in place of c and r (Leviathan et al. 2211.17192, r(n) measured as in TurboSpec),
    tau = 1 + sum of products of acceptance by position, apart by what a proposal rests on and forgotten as the text changes. Trying
    costs time, so there is a budget: against plain decoding a call may lose `slack` of its time and a reserve for its first rounds,
    together less than a twentieth. One object may serve many calls: what it learned stays, a call's budget is its own.

    The choice depends on clocks, so two sampled runs of a seed may differ; their law is the target's all the same.
    """

    sure = False

    def __init__(self, k_max: int = 8, slack: float = 0.02) -> None:
        if k_max < 1 or not 0 < slack < 1:
            raise ValueError(f"an adaptive pace needs k_max >= 1 and 0 < slack < 1, found {k_max} and {slack}")
        self.k_max = k_max
        self.costs = Costs()
        self.chances = Chances()
        self._wait: dict[int, int] = defaultdict(lambda: FIRST_WAIT)  # rounds between two trials of what did not pay
        self._since: dict[int, int] = defaultdict(lambda: FIRST_WAIT)
        self._budget = Budget(slack)
        self._reading = 0.25  # what a model takes to read a prompt, over what the target takes
        self.begin(0.0, 0)

    def begin(self, prefill_seconds: float, tokens: int) -> None:
        self._budget.begin(prefill_seconds, tokens)
        self._prefill, self._left = prefill_seconds, float(tokens)
        self._drafting, self._model_has_read = REMEASURE, False  # machine and text may have changed: a plain step comes first

    def next(self, evidence: list[int]) -> int:
        return self.choose([evidence])[0]

    def choose(self, ways: list[list[int]]) -> tuple[int, int]:
        """`next` for a drafter that can propose in several ways, each with evidence of its own -> k, and which way: the one that
        gains most, the next best where that may not be drafted now."""
        rows = len(ways[0])
        plain = self.costs.plain(rows)
        if plain is None or self._drafting >= REMEASURE:
            return 0, 0
        told = [way for way, one in enumerate(ways) if max(one) != KNOWS_NOTHING and one not in ways[:way]]
        each = {way: self._best(ways[way], plain) for way in told}
        # A plain step is soon due: here, where drafting gains less than half of what it does in the mean, it costs least.
        if self._drafting >= REMEASURE // 2 and each:
            usual = self.costs.worth(rows, plain) * plain - rows
            if max(gain for _, gain in each.values()) < usual / 2:
                return 0, 0
        for way in sorted(each, key=lambda way: -each[way][1]):
            if k := self._allowed(ways[way], plain, *each[way]):
                return k, way
        return 0, 0

    def _allowed(self, evidence: list[int], plain: float, k: int, gain: float) -> int:
        """`k` where it pays, or a trial of up to as many where one is due and can be paid; else 0."""
        rows, top, by_model = len(evidence), bucket(max(evidence)), A_MODEL in evidence
        pays = gain > MARGIN * rows

        def affordable(k: int, trial: bool) -> bool:
            worst = self.costs.draft(by_model, rows, k, DEAR) + self.costs.target(rows, k + 1, DEAR) - plain
            reading = self._reading * self._prefill if by_model else 0.0
            if trial and not self._model_has_read:
                worst += reading  # its first words in a call cost the reading of the prompt too
            return self._budget.affords(by_model, worst, reading, plain, trial)

        if pays and self.chances.knows(top) and self.costs.knows(rows, k + 1):
            return k if affordable(k, trial=False) else 0
        self._since[top] += 1
        if not pays and self._since[top] < self._wait[top]:
            return 0
        # A shorter trial is a step on the way only while it teaches something; else the budget is saved for the one that may pay.
        known = self.chances.knows(top)
        steps = (fewer for fewer in range(k, 0, -1) if fewer == k or not (known and self.costs.knows(rows, fewer + 1)))
        trial = next((fewer for fewer in steps if affordable(fewer, trial=True)), 0)
        if trial:
            self._since[top] = 0
        return trial

    def observe(self, round: Round) -> None:
        rows = len(round.drafted)
        self.costs.saw_target(rows, round.columns, round.target_seconds)
        won = sum(round.accepted) / rows + 1
        step, seconds = self.costs.plain(rows) or round.target_seconds, round.draft_seconds + round.target_seconds
        gain = (won - 1) * rows - self.costs.worth(rows, step) * (seconds - step)
        self.costs.won(rows, won * rows, seconds)
        self._budget.would_have_taken(step * won)
        self._left -= won
        if round.k == 0:
            self._drafting = 0
            return
        self._drafting += 1
        by_model = A_MODEL in round.evidence
        if not by_model or self._model_has_read:
            self.costs.saw_draft(by_model, rows, round.k, round.draft_seconds)
        elif self._prefill > 0:
            self._reading = max(0.0, round.draft_seconds - self.costs.draft(True, rows, round.k)) / self._prefill
        self._model_has_read |= by_model
        self._budget.lost(by_model, seconds - step * won)
        for drafted, accepted, evidence in zip(round.drafted, round.accepted, round.evidence, strict=True):
            self.chances.saw(evidence, drafted, accepted)
        top = bucket(max(round.evidence))
        self._wait[top] = FIRST_WAIT if gain >= 0 else min(2 * self._wait[top], LAST_WAIT)

    def _best(self, evidence: list[int], plain: float) -> tuple[int, float]:
        """The k >= 1 that gains most tokens over a plain step, less what its seconds are worth, and that gain.

        Not the one of most tokens a second in this round: rounds are unlike, and a second saved here is spent on the others.
        """
        rows, by_model, worth = len(evidence), A_MODEL in evidence, self.costs.worth(len(evidence), plain)
        chances = [self.chances.each(one, self.k_max) for one in evidence if one != KNOWS_NOTHING]
        alive, tokens, best = [1.0] * len(chances), 0.0, (0, 0.0, 0.0)
        for k in range(1, self.k_max + 1):
            alive = [chance * row[k - 1] for chance, row in zip(alive, chances, strict=True)]
            tokens += sum(alive)
            seconds = self.costs.draft(by_model, rows, k) + self.costs.target(rows, k + 1)
            gain = tokens - worth * (seconds - plain)
            if best[0] == 0 or gain > best[1]:
                best = (k, gain, tokens)
        k, gain, tokens = best
        if by_model and not self._model_has_read:  # the rounds left, if it speaks in all of them, share the reading of the prompt
            gain -= worth * self._reading * self._prefill / max(1.0, self._left / (1 + tokens / rows))
        return k, gain


MARGIN = 0.02  # a gain smaller than this is not worth the variance
REMEASURE = 24  # rounds in a row that draft before a plain step is timed again; a stale one would hide a loss
FIRST_WAIT, LAST_WAIT = 4, 64
