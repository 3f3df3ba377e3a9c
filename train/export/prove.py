"""`python -m draftsmith.train.export.prove FOLDER TARGET`: what a stranger's process finds in an exported folder, as one line of json."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.specdec.models import chat_ids, compatible, load, load_tokenizer, output_rows
from draftsmith.specdec.places import quiet

QUESTIONS = ("Write a line of Python that prints hello.", "What is the capital of France?")
TOKENS = 24


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the logits on a fixed text; equal only where weights and their use are equal to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of a sum may hang on the number of threads
    ids = torch.arange(3, 3 + 16).remainder(output_rows(model))[None]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits.float()
    torch.set_num_threads(threads)
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()


def tied(model: PreTrainedModel) -> bool:
    """Is the head the embedding, the same numbers in one place?"""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def reload(folder: str) -> PreTrainedModel:
    """The draft of a folder, from its safetensors alone; SystemExit where a key is missing, left over or of another shape."""
    with quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, use_safetensors=True)
    draft, report = loaded
    wrong = {
        what: sorted(map(str, keys))
        for what, keys in report.items()
        if keys and what in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if wrong:
        raise SystemExit(f"{folder} does not load strictly: {wrong}")
    return draft


def prove(folder: str, target_name: str) -> dict[str, object]:
    """Fingerprint of the reloaded draft, and how many greedy answers stay the target's with it as `assistant_model`."""
    draft = reload(folder)
    own, (target, theirs) = load_tokenizer(folder), load(target_name)
    compatible(theirs, own).raise_if_not()
    if (ours := output_rows(draft)) != output_rows(target):
        raise SystemExit(f"{folder} has {ours} output rows, the target {output_rows(target)}")
    write: Any = target.generate
    equal = 0
    for question in QUESTIONS:
        ids = torch.tensor([chat_ids(own, [{"role": "user", "content": question}])])
        settings: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        with quiet():
            alone, helped = write(ids, **settings), write(ids, assistant_model=draft, **settings)
        equal += torch.equal(alone, helped)
    return {"fingerprint": fingerprint(draft), "tied": tied(draft), "equal": equal, "compared": len(QUESTIONS), "tokens": TOKENS}


if __name__ == "__main__":
    print(json.dumps(prove(*sys.argv[1:3])))
