"""`python -m draftsmith.eval RECIPE [a.b=c ...]` is `draftsmith eval RECIPE [a.b=c ...]`."""

import sys

from draftsmith.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["eval", *sys.argv[1:]]))
