"""report.html: one file that asks nothing of anybody, with the verdict first and every figure that the report holds."""

from draftsmith.eval.page.document import html, write

__all__ = ["html", "write"]
