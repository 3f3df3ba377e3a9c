"""Which evaluation was the best, by held-out tokens a call and never by loss, and whether it is time to stop."""

from __future__ import annotations

from typing import Any


class Choice:
    """Remembers the best held-out figure `by`, and after how many evaluations without a better one training ends (`patience`; 0: never).

    It is part of a checkpoint, so a run that goes on has no more patience than it had.
    """

    def __init__(self, by: str, patience: int) -> None:
        self.by, self.patience = by, patience
        self.best: float | None = None
        self.step = 0  # of the best
        self.since = 0  # evaluations

    def see(self, step: int, held_out: dict[str, Any]) -> bool:
        """Is this the best evaluation so far? One that only equals the best is none, and wears patience."""
        better = self.best is None or held_out[self.by] > self.best
        if better:
            self.best, self.step, self.since = held_out[self.by], step, 0
        else:
            self.since += 1
        return better

    @property
    def over(self) -> bool:
        return 0 < self.patience <= self.since

    def why(self) -> str:
        return f"no better held-out {self.by} in {self.since} evaluations; the best was {self.best:.3f}, at step {self.step}"

    def state_dict(self) -> dict[str, Any]:
        return {"by": self.by, "best": self.best, "step": self.step, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["by"] != self.by:
            raise ValueError(
                f"the checkpoint was chosen by {state['by']}, this run chooses by {self.by}: name it otherwise (name=...)"
            )
        self.best, self.step, self.since = state["best"], state["step"], state["since"]
