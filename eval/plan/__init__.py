"""What a pair will be worth on a machine, before anything is downloaded or trained."""

from draftsmith.eval.plan.run import Asked, plan

__all__ = ["Asked", "plan"]
