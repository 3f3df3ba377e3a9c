"""Which exit and which block length to serve: both axes predicted from a few clocks and one pass, then measured."""

from draftsmith.eval.sweep.asked import Asked
from draftsmith.eval.sweep.run import run_sweep

__all__ = ["Asked", "run_sweep"]
