"""What happens after each step: its line in the log, the held-out figures, a checkpoint where one is due or asked for, and whether
to stop."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

from draftsmith.distill import Batch, Objective
from draftsmith.recipes import Recipe
from draftsmith.recipes.progress import Progress
from draftsmith.train import checkpoint
from draftsmith.train.choice import Choice
from draftsmith.train.data.plan import Order
from draftsmith.train.interrupt import RESUME_ME, Interrupted, Signals, Wishes
from draftsmith.train.loop import Record, evaluate
from draftsmith.train.on_policy import Mixture
from draftsmith.train.record import Log


class Watch:
    """Called with each step's record; True ends the training, and `Interrupted` where a signal asked for that."""

    def __init__(
        self, recipe: Recipe, log: Log, plan: Order, objective: Objective, held_out: list[Batch], accelerator: Accelerator, choice: Choice,
        mixture: Mixture | None, steps_of: dict[str, Any], needs: int, signals: Signals,
    ) -> None:  # fmt: skip
        self.recipe, self.log, self.plan, self.objective, self.held_out = recipe, log, plan, objective, held_out
        self.accelerator, self.choice, self.mixture, self.steps_of, self.needs = accelerator, choice, mixture, steps_of, needs
        self.signals, self.saved = signals, 0
        self.progress = Progress("training", plan.steps, quiet=not accelerator.is_main_process)

    def __call__(self, record: Record) -> bool:
        step, settings = record.step, self.recipe.train
        own = {} if self.mixture is None else {"on_policy": self.mixture.takes(step - 1)}
        self.log.write(_line(record) | own)
        self.progress.at(
            step, f"loss {record.loss:.3f}, acceptance {record.acceptance:.3f}, {record.tokens_per_second:.0f} tokens/s"
        )
        due = step == self.plan.steps or step % settings.save_every == 0
        if due or step % settings.evaluate_every == 0:
            self._judge(step, due)
        wishes = self._wishes()
        if wishes.save and self.saved < step:
            self._save(step, None)  # no figures: judging takes longer than many a scheduler waits, and would wear patience
        if wishes.leave:
            self.progress.stop()
            raise Interrupted(
                f"{self.signals.name or 'a signal'}: {self.recipe.folder / f'step-{step}'} is written, and the same command goes on from it "
                f"(exit code {RESUME_ME})"
            )
        return self.choice.over

    def _wishes(self) -> Wishes:
        """What any process was asked for, all of them are."""
        mine = self.signals.wishes()
        if self.accelerator.num_processes == 1:
            return mine
        asked: Any = self.accelerator.reduce(torch.tensor(mine, dtype=torch.float32, device=self.accelerator.device), "sum")
        return Wishes(*(one > 0 for one in asked.tolist()))

    def _judge(self, step: int, due: bool) -> None:
        settings, choice = self.recipe.train, self.choice
        means = evaluate(self.objective, self.held_out, self.accelerator, settings.k)
        better = choice.see(step, means)
        self.log.write({"step": step, "held_out": means})
        if choice.over:
            self.log.write({"step": step, "stopped": choice.why()})
        # With patience the best evaluation is kept whenever it comes, and the one at which it ran out.
        if due or choice.over or (better and settings.patience):
            self._save(step, means)

    def _save(self, step: int, means: dict[str, float] | None) -> None:
        settings, plan = self.recipe.train, self.steps_of | {"at": self.plan.state()}
        self.log.sync()
        checkpoint.save(
            self.recipe.folder, step, self.objective, self.accelerator, means, plan, settings.keep, self.needs, self.choice.by
        )
        self.saved = step


def _line(record: Record) -> dict[str, Any]:
    """A step's line in the log; JSON has no word for what is not finite."""
    line = record._asdict()
    rows = line.pop("bad")
    if rows is None:
        return line
    return {"step": record.step, "skipped": {"loss": str(record.loss), "grad_norm": str(record.grad_norm), "rows": rows}}
