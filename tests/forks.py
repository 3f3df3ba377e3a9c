"""Commands in forks of one process that has imported everything: a kill costs no import, and comes at a chosen event, however busy
the machine is.

Run as a script it is that process. An event is a file of the current folder opened for writing, renamed, made or removed; in between
the folder is as the last event left it, but for what libraries write by themselves, so a chosen event may also start a clock of CPU time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

EVENTS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


class Ended(NamedTuple):
    """How a command ended (minus the number of the signal that killed it), what it printed, and its events."""

    code: int
    stdout: str
    stderr: str
    events: list[str]


class Forks:
    """`run` a command of draftsmith in a folder, and hand it `signals`: (number, text, which) sends itself signal `number` at the `which`th
    event, counted from 1, in which `text` stands; with a fourth, so many CPU seconds later, which only SIGPROF can."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, folder: Path, *words: str, signals: tuple[tuple[Any, ...], ...] = (), limit: int = 0) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"folder": str(folder), "words": words, "signals": signals, "limit": limit}),
            file=self._process.stdin,
            flush=True,
        )
        code = json.loads(self._process.stdout.readline())
        told = {name: (folder / f".{name}").read_text() for name in ("stdout", "stderr", "events")}
        return Ended(code, told["stdout"], told["stderr"], told["events"].splitlines())


@contextmanager
def forks() -> Iterator[Forks]:
    from runs import environment

    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            yield Forks(process)
        finally:
            process.kill()


def _serve() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import draftsmith.train.run  # noqa: F401
    from draftsmith.cli import main

    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            _watched(Path(asked["folder"]), [tuple(one) for one in asked["signals"]])
            if asked["limit"]:
                import resource

                resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"], asked["limit"]))
            code = main(asked["words"])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _watched(folder: Path, signals: list[tuple[Any, ...]]) -> None:
    os.chdir(folder)
    for number, name in ((1, ".stdout"), (2, ".stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    log = os.open(".events", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    root, seen = f"{folder}/", dict.fromkeys(signals, 0)

    def hear(event: str, told: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(told[0], (str, os.PathLike)) or not told[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event not in EVENTS:
            return
        path = os.path.abspath(os.fsdecode(told[0]))
        if not path.startswith(root):
            return
        line = f"{event} {path.removeprefix(root)}"
        os.write(log, f"{line}\n".encode())
        for one in signals:
            number, text, which, *later = one
            seen[one] += text in line
            if text in line and seen[one] == which:
                if later and later[0]:
                    signal.setitimer(signal.ITIMER_PROF, later[0])
                else:
                    os.kill(os.getpid(), number)

    sys.addaudithook(hear)


if __name__ == "__main__":
    _serve()
