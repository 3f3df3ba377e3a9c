"""What an adaptive pace may lose by trying: a share of what plain decoding would take, within every call and over all of them."""

from __future__ import annotations

RESERVE = 0.025  # of a call's time may be lost beyond the slack, so that a short call need not earn its first draft


class Budget:
    """Seconds lost against plain decoding, by a model's drafts and by lookups apart: what one wins pays for no trials of the other."""

    def __init__(self, slack: float) -> None:
        self.slack = slack
        self._life_lost, self._life_plain = {True: 0.0, False: 0.0}, 0.0
        self.begin(0.0, 0)

    def begin(self, prefill_seconds: float, tokens: int) -> None:
        self._lost, self._plain, self._prefill, self._tokens = {True: 0.0, False: 0.0}, prefill_seconds, prefill_seconds, tokens
        self._life_plain += prefill_seconds

    def would_have_taken(self, seconds: float) -> None:
        """Plain decoding, for what a round has won."""
        self._plain += seconds
        self._life_plain += seconds

    def lost(self, by_model: bool, seconds: float) -> None:
        self._lost[by_model] += seconds
        self._life_lost[by_model] = max(0.0, self._life_lost[by_model] + seconds)

    def affords(self, by_model: bool, worst: float, reading: float, plain_step: float, trial: bool) -> bool:
        """Whether a round may lose `worst` seconds; `reading` more are owed by a model that has not read the prompt, or were.

        One or two rounds may fail before a call has earned them, but no more than a share of what it can take. A trial must fit
        besides into what the call has lost by the other one and into what all calls may lose.
        """
        ahead = min(2 * worst + reading, RESERVE * (self._prefill + self._tokens * plain_step))
        owed, limit = self._lost[by_model] + worst, self.slack * self._plain + ahead
        if not trial:
            return owed <= limit
        in_life = self._life_lost[by_model] + worst <= self.slack * self._life_plain
        return in_life and owed + max(0.0, self._lost[not by_model]) <= limit
