"""Drafts with int8 matrices, by torchao itself (`make test-engines`): safetensors that a fresh process reads to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from draftsmith.specdec import ModelDrafter, generate, load
from draftsmith.specdec.models import load_model
from draftsmith.train.export import EXPORTS
from draftsmith.train.export.conditions import fit
from draftsmith.train.export.int8 import plain, quantised
from finished import a_run, with_chats, with_export


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_int8_draft_is_written_read_and_judged(
    family: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = with_export(with_chats(a_run(tmp_path, family, tie_word_embeddings=tied), tmp_path), quantization="int8")
    place = EXPORTS["transformers"](recipe, False)  # a fresh process finds its logits equal to the bit
    assert place.name == "transformers-int8"
    with safe_open(place / "model.safetensors", "pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    eight = {name.removesuffix("._weight_qdata") for name, kind in kinds.items() if kind == torch.int8 and name.endswith("qdata")}
    assert {"model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"} < eight
    assert ("lm_head" in eight) == (not tied)
    assert kinds["model.embed_tokens.weight"] == torch.float32
    assert json.loads((place / "config.json").read_text())["quantization_config"]["quant_method"] == "torchao"
    said = re.search(r"int8 costs in acceptance: .*", capsys.readouterr().out)
    assert said
    assert f"| quantisation | {said[0]} |" in (place / "README.md").read_text()
    target, tokenizer = load(recipe.target.model)
    prompt = tokenizer("the theory that th").input_ids
    ours = generate(target, [prompt], ModelDrafter(load_model(place)), k=3, max_new_tokens=16)
    assert ours.tokens == generate(target, [prompt], max_new_tokens=16).tokens


def test_the_judged_numbers_are_those_of_the_int8_draft(tmp_path: Path) -> None:
    draft = fit(a_run(tmp_path)).draft
    made = quantised(draft, tmp_path, "transformers", torch.bfloat16)
    assert made.model.layers[0].mlp.up_proj.weight.dtype == made.lm_head.weight.dtype == torch.float32
    served = quantised(draft, tmp_path, "vllm", torch.bfloat16)
    assert served.model.layers[0].mlp.up_proj.weight.dtype == served.lm_head.weight.dtype == torch.bfloat16
    assert not hasattr(served.lm_head.weight, "qdata")
    stands_for = plain(made, draft)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        own, eight, kept = (one(input_ids=ids).logits for one in (draft, made, stands_for))
    assert torch.allclose(eight, kept, atol=1e-4)
    assert (own - kept).abs().max() > 1e-2
    weight, rounded = draft.model.layers[0].mlp.up_proj.weight, stands_for.model.layers[0].mlp.up_proj.weight
    step = weight.abs().amax(-1, keepdim=True) / 127
    assert ((weight - rounded).abs() <= 0.51 * step).all()
