"""The command that serves a pair, as a script beside the draft: it says every setting on which the pair hangs."""

from __future__ import annotations

from pathlib import Path


def write_script(folder: Path, lines: str) -> None:
    """serve.sh of an exported folder."""
    (folder / "serve.sh").write_text(lines, encoding="utf-8")


HEAD = "#!/bin/sh\n"
HERE = 'here=$(cd "$(dirname "$0")" && pwd)\n'


def llama_cpp(target: str | None, k: int, positions: int | None) -> str:
    """For llama-server; `target` is a file in the folder, a path, or not known."""
    if target is None:
        found = "target=${1:?the .gguf of the target is needed: sh serve.sh TARGET.gguf}\nshift\n"
    else:
        found = f'target="{target}"\n' if target.startswith("/") else f'target="$here/{target}"\n'
    return (
        f"{HEAD}# llama.cpp. Further flags go behind.\n{HERE}{found}"
        f'exec llama-server -m "$target" -md "$here/draft.gguf" --spec-type draft-simple --spec-draft-n-max {k}{_at_most(positions, "-c")} "$@"\n'
    )


def vllm(target: str, dtype: str, parts: int, positions: int | None, config: str) -> str:
    """For `vllm serve`; the config's path to the draft is the script's own folder, wherever it was moved."""
    return (
        f"{HEAD}# vLLM. TARGET=... serves another copy of the target; further flags go behind.\n{HERE}"
        f'config=$(sed "s|\\"model\\": \\"[^\\"]*\\"|\\"model\\": \\"$here\\"|" "$here/{config}")\n'
        f'exec vllm serve "${{TARGET:-{target}}}" --dtype {dtype} --tensor-parallel-size {parts}{_at_most(positions, "--max-model-len")}'
        ' --speculative-config "$config" "$@"\n'
    )


def sglang(target: str, dtype: str, parts: int, positions: int | None, k: int) -> str:
    """For SGLang: k steps of the draft, and with the target's last token k + 1 to be checked."""
    return (
        f"{HEAD}# SGLang. TARGET=... serves another copy of the target; further flags go behind. Not with --enable-dp-attention.\n{HERE}"
        f'exec python -m sglang.launch_server --model-path "${{TARGET:-{target}}}" --dtype {dtype} --tp-size {parts}'
        f'{_at_most(positions, "--context-length")} --speculative-algorithm STANDALONE --speculative-draft-model-path "$here"'
        f' --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1} "$@"\n'
    )


def _at_most(positions: int | None, flag: str) -> str:
    return f" {flag} {positions}" if positions else ""
