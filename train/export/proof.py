"""What was exported is looked at by a process that knows nothing of the one that wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def proved(module: str, folder: Path, target: str) -> dict[str, Any]:
    """What `draftsmith.train.export.MODULE` finds in the folder; RuntimeError where it does not load, or greedy answers are not the target's."""
    command = [sys.executable, "-m", f"draftsmith.train.export.{module}", str(folder), target]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the exported folder does not load in a fresh process:\n{done.stderr.strip()[-2000:]}")
    proof: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if proof["equal"] != proof["compared"]:
        raise RuntimeError(
            f"with this draft only {proof['equal']} of {proof['compared']} greedy answers equal the target's own; nothing was exported"
        )
    return proof
