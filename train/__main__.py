"""`accelerate launch -m draftsmith.train RECIPE [a.b=c ...]` is `draftsmith train RECIPE [a.b=c ...]`."""

import sys

from draftsmith.cli import main
from draftsmith.train.launch import leave

if __name__ == "__main__":
    leave(main(["train", *sys.argv[1:]]))
