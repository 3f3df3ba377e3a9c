"""`python -m draftsmith.train.export.prove_exits FOLDER TARGET`: what a stranger's process gets of each exit, as one line of json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from draftsmith.specdec import generate, load, load_drafter
from draftsmith.specdec.models import chat_ids, eos_ids, real_ids
from draftsmith.train.export.prove import QUESTIONS, TOKENS


def prove(folder: str, target_name: str) -> dict[str, int]:
    """How many greedy answers stay the target's with each exit of the folder as its drafter."""
    target, tokenizer = load(target_name)
    exits = json.loads((Path(folder) / "drafter.json").read_text(encoding="utf-8"))["settings"]["exits"]
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": question}]) for question in QUESTIONS]
    settings = {"max_new_tokens": TOKENS, "eos": eos_ids(target, tokenizer), "vocab_size": real_ids(target, tokenizer)}
    equal = 0
    alone = [generate(target, [one], **settings).tokens for one in prompts]  # type: ignore[arg-type]
    for one in exits:
        drafter = load_drafter(f"{folder}:{one['layer']}", target, tokenizer)
        equal += sum(
            generate(target, [ids], drafter, **settings).tokens == wanted  # type: ignore[arg-type]
            for ids, wanted in zip(prompts, alone, strict=True)
        )
    return {"exits": len(exits), "equal": equal, "compared": len(exits) * len(prompts), "tokens": TOKENS}


if __name__ == "__main__":
    print(json.dumps(prove(*sys.argv[1:3])))
