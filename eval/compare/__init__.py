"""Reports of `draftsmith eval` side by side, and against each other where they answered the same prompts under the same settings."""

from draftsmith.eval.compare.compared import Compared, compare
from draftsmith.eval.compare.shown import page, show_comparison

__all__ = ["Compared", "compare", "page", "show_comparison"]
