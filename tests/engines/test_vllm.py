"""Our folders in vLLM itself (`make test-engines`): the target's own text, and as many drafted tokens accepted as in our decoder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.recipes import Recipe
from draftsmith.recipes.checksums import write_sums
from draftsmith.specdec import ModelDrafter, generate, load
from draftsmith.specdec.models import load_model
from draftsmith.specdec.places import quiet
from draftsmith.train.export import EXPORTS
from finished import a_run, with_chats, with_export
from tiny import noisy, tiny_tokenizer

# The only width of a head that every attention kernel for CPUs has, among those that are small.
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
K, TOKENS = 4, 24
PROMPTS = [[1, *tiny_tokenizer()(text).input_ids] for text in ("the theory that th", "another one, 123")]


def in_vllm(target: str, config: Path | None = None) -> dict[str, Any]:
    """What vLLM writes behind PROMPTS, and how many tokens it drafted and accepted for it."""
    words = [target, str(config or ""), json.dumps(PROMPTS), str(TOKENS)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("in_vllm.py")
    done = subprocess.run([os.environ["VLLM_PYTHON"], str(script), *words], capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def pair(place: Path, sigma: float, dtype: torch.dtype = torch.float32) -> Recipe:
    """A run whose best draft is its target, with noise, in float32; the target is kept in `dtype`."""
    recipe = a_run(place, target=WIDE, **WIDE)
    target = load_model(recipe.target.model)
    with quiet():
        noisy(target, sigma).save_pretrained(recipe.folder / "step-4" / "draft")
        target.to(dtype).save_pretrained(recipe.target.model)
    write_sums(recipe.folder / "step-4")
    return recipe


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The text of the target without a draft, which is the same for all sigmas."""
    found = in_vllm(pair(tmp_path_factory.mktemp("alone"), 0.0).target.model)
    assert found["drafts"] == 0
    written: list[list[int]] = found["tokens"]
    return written


@pytest.mark.parametrize(("sigma", "quantization"), [(0.0, "f16"), (0.1, "f16"), (0.1, "int8")])
def test_a_draft_is_taken_and_accepted_as_in_our_decoder(
    sigma: float, quantization: str, alone: list[list[int]], tmp_path: Path
) -> None:
    recipe = with_export(with_chats(pair(tmp_path, sigma), tmp_path), quantization=quantization)
    folder = EXPORTS["vllm"](recipe, False)
    found = in_vllm(recipe.target.model, folder / "speculative-config.json")
    assert found["tokens"] == alone
    target, _ = load(recipe.target.model)
    ours = generate(target, PROMPTS, ModelDrafter(load_model(folder)), k=K, max_new_tokens=TOKENS)
    assert found["tokens"] == ours.tokens
    # Both get the first token of a text from the prompt's own call. vLLM drafts K tokens in every later call, we no more than the text has left.
    calls = sum(len(row) - 1 for row in ours.rounds)
    accepted = sum(kept for row in ours.rounds for _, kept in row)
    assert (found["drafts"], found["draft_tokens"]) == (calls, K * calls)
    if sigma:
        assert 0 < found["accepted_tokens"] < found["draft_tokens"]
        assert found["accepted_tokens"] == accepted
    else:
        assert found["accepted_tokens"] >= accepted > 30


def test_an_int8_draft_is_taken_in_the_dtype_of_its_target(tmp_path: Path) -> None:
    recipe = with_export(with_chats(pair(tmp_path, 0.05, torch.bfloat16), tmp_path), quantization="int8")
    found = in_vllm(recipe.target.model, EXPORTS["vllm"](recipe, False) / "speculative-config.json")
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]
