"""`accelerate launch -m draftsmith.train RECIPE [a.b=c ...]` is `draftsmith train RECIPE [a.b=c ...]`."""

import sys

from draftsmith.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
