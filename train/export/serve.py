"""The command that serves a pair, as a script beside the draft: it says every setting on which the pair hangs."""

from __future__ import annotations

from pathlib import Path


def write_script(folder: Path, lines: str) -> None:
    """serve.sh of an exported folder."""
    (folder / "serve.sh").write_text(lines, encoding="utf-8")


def llama_cpp(target: str | None, k: int, positions: int | None) -> str:
    """For llama-server; `target` is a file in the folder, a path, or not known."""
    if target is None:
        model = '"${1:?the .gguf of the target is needed: sh serve.sh TARGET.gguf}"; shift'
    else:
        model = f'"{target}"' if target.startswith("/") else f'"$here/{target}"'
    context = f" -c {positions}" if positions else ""
    return (
        "#!/bin/sh\n"
        "# llama.cpp: the target checks up to the last number of tokens that the draft guesses in a call. Further flags go behind.\n"
        'here=$(cd "$(dirname "$0")" && pwd)\n'
        f"target={model}\n"
        f'exec llama-server -m "$target" -md "$here/draft.gguf" --spec-type draft-simple{context} --spec-draft-n-max {k} "$@"\n'
    )
