"""Drafts of every kind: what is trained, what is kept while it is, and the plain folder that a fresh process finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model as load_state
from safetensors.torch import save_model as save_state
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from draftsmith.distill import Batch, CutDraft, DistillDraft, LiveTeacher, WholeDraft, acceptance, collate
from draftsmith.distill.draft import Origin
from draftsmith.distill.making.lora import merged, with_lora
from draftsmith.distill.making.make import make_draft
from draftsmith.distill.making.pad_rows import with_rows
from draftsmith.specdec import ModelDrafter, generate
from runs import environment
from tiny import noisy, plain_greedy, tiny, tiny_folder, tiny_tokenizer

ROWS = [([5, 9, 11, 4, 2], 3), ([7, 8, 2], 1), ([3, 3, 20, 21, 22, 23, 24, 2], 6)]
BATCH = collate(ROWS)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=BATCH.ids, use_cache=False).logits


def trained(draft: Any, teacher: Any, steps: int = 5, rate: float = 1e-2, batch: Batch = BATCH) -> list[float]:
    """A few plain steps -> the loss before each."""
    objective = DistillDraft(draft, teacher)
    optimizer = torch.optim.AdamW([one for one in objective.trainable.parameters() if one.requires_grad], lr=rate)
    losses = []
    objective.trainable.train()
    for _ in range(steps):
        loss = objective.loss(batch)
        optimizer.zero_grad()
        (loss.total / loss.metrics["scored"]).backward()
        optimizer.step()
        losses.append(loss.total.item())
    objective.trainable.eval()
    return losses


# --- LoRA


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "qwen3_moe"])
def test_only_adapters_learn_and_the_merged_model_says_what_the_adapted_one_says(family: str) -> None:
    target = tiny(family)
    model = noisy(target, 0.2)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    untouched = logits(model)
    draft = WholeDraft(with_lora(model, rank=4, alpha=8))
    assert torch.equal(logits(model), untouched)  # B = 0
    learning = [name for name, one in draft.named_parameters() if one.requires_grad]
    assert learning
    assert all(".lora_" in name for name in learning)
    losses = trained(draft, target)
    assert losses[-1] < losses[0]
    plain = draft.whole()
    assert not torch.allclose(logits(plain), untouched, atol=1e-2)
    assert torch.allclose(logits(plain), logits(model), atol=1e-5, rtol=1e-5)
    after = {name.replace("base_layer.", ""): one for name, one in model.state_dict().items() if ".lora_" not in name}
    assert after.keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in after.items())  # after the merge too
    assert not any("lora" in name for name in plain.state_dict())


def test_a_checkpoint_of_adapters_is_small_and_restores_them(tmp_path: Path) -> None:
    target = tiny(hidden_size=64, intermediate_size=256)
    draft, other = (WholeDraft(with_lora(noisy(target, 0.2), rank=2, alpha=4)) for _ in range(2))
    trained(draft, target)
    save_state(draft, str(tmp_path / "adapters"))  # what the loop's checkpoint calls
    save_state(WholeDraft(noisy(target, 0.2)), str(tmp_path / "all"))
    assert (tmp_path / "adapters").stat().st_size < 0.15 * (tmp_path / "all").stat().st_size
    assert not torch.allclose(logits(other.model), logits(draft.model))
    load_state(other, str(tmp_path / "adapters"))
    assert torch.equal(logits(other.model), logits(draft.model))
    other.load_state_dict(draft.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="Missing key"):  # what is trained may not be missing
        other.load_state_dict({}, strict=True)


def test_adapters_in_low_precision_are_fp32_and_merged_once() -> None:
    model = noisy(tiny(), 0.2).to(torch.bfloat16)
    draft = WholeDraft(with_lora(model, rank=2, alpha=4))
    assert {one.dtype for one in draft.parameters() if one.requires_grad} == {torch.float32}
    assert draft.whole().dtype == torch.bfloat16


def test_adapters_that_cannot_be_merged_or_found_are_refused() -> None:
    with pytest.raises(ValueError, match=r"linear layers are .*q_proj"):
        with_lora(tiny(), targets=["nowhere"])
    with pytest.raises(ValueError, match="head is its embedding"):
        with_lora(tiny("gemma2"), targets=["q_proj", "embed_tokens"])
    model = with_lora(tiny(), rank=2)
    with pytest.raises(ValueError, match="adapters already"):
        with_lora(model)
    assert not any("lora" in name for name in merged(model).state_dict())


def test_a_teacher_with_adapters_or_one_that_is_the_draft_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    target = tiny()
    teacher = LiveTeacher(target)
    draft = WholeDraft(with_lora(target, rank=2))  # put on the teacher's own modules
    for one in (target, get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"]))):
        with pytest.raises(ValueError, match="the teacher carries adapters"):
            DistillDraft(WholeDraft(tiny(seed=1)), one)
    with pytest.raises(ValueError, match="are one model"):
        DistillDraft(draft, teacher)
    plain = tiny(seed=1)
    with pytest.raises(ValueError, match="are one model"):
        DistillDraft(plain, plain)


# --- a same-family checkpoint, padded vocabularies


def padded(model: PreTrainedModel, rows: int, seed: int = 5) -> PreTrainedModel:
    """The same model with loud rows behind its last id: whoever lets them into a softmax sees another law."""
    had = model.get_output_embeddings().weight.shape[0]
    model.resize_token_embeddings(rows, mean_resizing=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        for one in (model.get_input_embeddings(), model.get_output_embeddings()):
            one.weight[had:] = 3 * torch.randn(rows - had, one.weight.shape[1])
    return model


@pytest.mark.parametrize("rows", [(64, 61), (61, 64), (64, 70), (70, 64)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padding_of_either_vocabulary_has_no_mass_in_loss_or_figures(family: str, rows: tuple[int, int], tmp_path: Path) -> None:
    target, model = tiny(family), noisy(tiny(family), 0.3)
    wanted = DistillDraft(noisy(tiny(family), 0.3), tiny(family)).loss(BATCH)
    p, q = (logits(one)[BATCH.scored] for one in (target, model))
    target, model = padded(target, rows[1]), padded(model, rows[0])
    objective = DistillDraft(WholeDraft(model, target, real=61), LiveTeacher(target, real=61))
    found = objective.loss(BATCH)
    assert abs(float(found.total) - float(wanted.total)) < 1e-4
    assert abs(float(found.metrics["acceptance"]) - float(acceptance(q, p).sum())) < 1e-4
    found.total.backward()
    slope = model.get_output_embeddings().weight.grad
    assert float(slope[:61].abs().max()) > 0
    if family == "llama":  # not tied
        assert rows[0] == 61 or float(slope[61:].abs().max()) == 0
    objective.save(tmp_path)
    draft, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert draft.config.vocab_size == draft.get_output_embeddings().weight.shape[0] == rows[1]
    said = logits(draft)
    assert torch.allclose(said[..., :61], logits(model)[..., :61], atol=1e-5)
    if rows[1] > 61:
        chance = said.softmax(-1)[..., 61:]
        assert float(chance.max()) < 1 / 61
        assert int(said.argmax(-1).max()) < 61
        if family == "llama":  # no soft cap: the very mean of what real ids get, wherever that lies
            assert torch.allclose(said[..., 61:], said[..., :61].mean(-1, keepdim=True).expand_as(said[..., 61:]), atol=1e-4)
    text = generate(target, [[5, 9, 11]], ModelDrafter(draft, vocab_size=61), k=3, max_new_tokens=12, vocab_size=61)
    assert text.tokens == generate(target, [[5, 9, 11]], max_new_tokens=12, vocab_size=61).tokens


def test_unequal_rows_and_real_ids_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"64 output rows, the target 61.*real=N"):
        DistillDraft(WholeDraft(tiny(vocab_size=64)), tiny())
    with pytest.raises(ValueError, match="61 real ids asked of LlamaForCausalLM, whose head has 40 rows"):
        WholeDraft(tiny(vocab_size=40), tiny(), real=61)
    with pytest.raises(ValueError, match="70 real ids asked of a draft of 61 rows"):
        with_rows(tiny(), 80, 70)
    assert with_rows(model := tiny(), 61) is model


def test_a_cut_of_a_padded_target_learns_over_real_ids_and_keeps_every_row() -> None:
    target = padded(tiny(), 64)
    draft = CutDraft(target, [0, 1], real=61)
    trained(draft, LiveTeacher(target, real=61))
    assert draft.whole().get_output_embeddings().weight.shape[0] == 64


def test_a_checkpoint_must_speak_the_targets_ids(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tiny_folder(tmp_path / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer()
    tiny_folder(tmp_path / "other", swapped=(70, 71))
    teacher = LiveTeacher(target)
    with pytest.raises(ValueError, match="the tokenizers differ: id 70"):
        make_draft("checkpoint", target, teacher, tokenizer=tokenizer, model=str(tmp_path / "other"))
    short = tiny_folder(tmp_path / "short", seed=1, num_hidden_layers=1)
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    made = make_draft(
        "checkpoint",
        target,
        teacher,
        tokenizer=tokenizer,
        real=len(tokenizer),
        model=short,
        lora={"rank": 2, "alpha": 4},
        say=said.append,
    )
    assert any("at most 64 tokens, the target 2048" in line for line in said)
    assert made.layers == []
    assert all(".lora_" in name for name, one in made.draft.named_parameters() if one.requires_grad)
    losses = trained(made.draft, teacher)
    assert losses[-1] < losses[0]


def test_make_draft_makes_each_kind() -> None:
    target = tiny()
    teacher = LiveTeacher(target)
    enough = collate([([3 + (7 * i + j) % 50 for j in range(20)], 2) for i in range(4)])  # a map of 32 features needs more tokens
    rows = {"batches": [enough], "held_out": [enough], "say": lambda line: None}
    assert make_draft("layers", target, teacher, layers=[0, 2]).layers == [0, 2]
    assert make_draft("layers", target, teacher, layers="first:2").layers == [0, 1]
    made = make_draft("layers", target, teacher, layers="auto:2", steps=1, **rows)
    assert made.layers == made.tried[0].layers
    made = make_draft("width", target, teacher, layers="ends:2", intermediate=24, heads=2, **rows)
    assert isinstance(made.draft, CutDraft)
    assert made.draft.body.config.intermediate_size == 24
    assert made.layers == [0, 2]
    made = make_draft("width", target, teacher, hidden=16, **rows)
    assert isinstance(made.draft, WholeDraft)
    assert made.layers == [0, 1, 2]
    DistillDraft(made.draft, teacher).loss(BATCH).total.backward()
    with pytest.raises(ValueError, match="at least one of intermediate"):
        make_draft("width", target, teacher, layers="first:2", **rows)
    with pytest.raises(ValueError, match="did you mean 'layers'"):
        make_draft("layer", target, teacher, layers="first:2")


# --- what a fresh process finds

READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    torch.set_num_threads(1)
    with torch.no_grad():
        said = model.eval()(input_ids=torch.tensor([[5, 9, 11, 4]]), use_cache=False).logits[0]
    config = model.config
    found[folder] = {
        "logits": said.double().tolist(), "wrong": {what: sorted(map(str, keys)) for what, keys in report.items() if keys},
        "tied": config.tie_word_embeddings, "positions": config.max_position_embeddings, "rope": getattr(config, "rope_parameters", None),
        "ids": [config.bos_token_id, config.eos_token_id, config.pad_token_id],
        "said": [model.generation_config.eos_token_id, model.generation_config.temperature],
    }
print(json.dumps(found))
"""


def test_every_kind_of_draft_reloads_in_a_fresh_process_as_it_was(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    wanted: dict[str, Any] = {}
    for family in ("llama", "gemma2", "gpt2"):  # untied, tied, tied with a learned place
        target = tiny(family, **({} if family == "gpt2" else {"rope_parameters": rope}))
        target.generation_config = GenerationConfig(
            bos_token_id=1, eos_token_id=[2, 7], pad_token_id=2, do_sample=True, temperature=0.6
        )
        teacher = LiveTeacher(target)
        rows = {"batches": [BATCH], "held_out": [BATCH], "say": lambda line: None}
        drafts: dict[str, nn.Module] = {
            "as cut": CutDraft(target, [0, 2]),
            "mapped": CutDraft(target, [0, 2]),
            "whole": WholeDraft(noisy(target, 0.2), target),
            "adapters": WholeDraft(with_lora(noisy(target, 0.2), rank=2), target),
            "padded": WholeDraft(padded(noisy(target, 0.2), 70), target, real=61),
        }
        if family != "gpt2":
            drafts["narrow"] = make_draft("width", target, teacher, layers=[0, 2], intermediate=24, heads=2, **rows).draft
        if family == "llama":
            drafts["rotated"] = make_draft("width", target, teacher, hidden=16, intermediate=24, real=61, **rows).draft
        for name, draft in drafts.items():
            if name != "as cut":
                trained(draft, LiveTeacher(target, 61), steps=2)
            folder = tmp_path / f"{family} {name}"
            DistillDraft(draft, teacher, origin=Origin("T", "r", tiny_tokenizer())).save(folder)
            assert json.loads((folder / "drafter.json").read_text())["target"] == "T"
            with torch.no_grad():
                said = draft.whole().eval()(input_ids=torch.tensor([[5, 9, 11, 4]]), use_cache=False).logits[0]
                own = draft.eval().head(draft(*draft.inputs(collate([([5, 9, 11, 4, 3], 1)]))))  # what was trained
                assert torch.allclose(said[:, : own.shape[1]], own, atol=1e-3), folder
            wanted[str(folder)] = said, target, name
    done = subprocess.run([sys.executable, "-c", READ, *wanted], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for folder, (said, target, name) in wanted.items():
        one = found[folder]
        assert not one["wrong"], (folder, one["wrong"])
        assert torch.equal(torch.tensor(one["logits"], dtype=torch.float64), said.double()), folder
        assert one["tied"] == (target.config.tie_word_embeddings and name in ("as cut", "whole", "adapters", "padded")), folder
        assert one["positions"] == 512
        assert one["rope"] == getattr(target.config, "rope_parameters", None)
        assert one["ids"] == [1, target.config.eos_token_id, target.config.pad_token_id], folder
        assert one["said"] == [[2, 7], 0.6]


# --- one sample


@pytest.mark.parametrize("family, layers", [("llama", [0]), ("gemma2", [0, 2])])
def test_one_row_is_learned_by_heart_and_then_every_drafted_token_is_kept(family: str, layers: list[int], tmp_path: Path) -> None:
    target = tiny(family)
    with torch.no_grad():  # a law that is nearly flat has near ties, which no draft needs to get right
        target.model.norm.weight.copy_(target.model.norm.weight * 8 + (7 if family == "gemma2" else 0))
    prompt = [30, 31, 32] if family == "llama" else [5, 9, 11]
    answer = plain_greedy(target, prompt, 24)
    assert len(set(answer)) > 3
    draft = CutDraft(target, layers)
    row = collate([(prompt + answer, len(prompt))])
    before = generate(target, [prompt], ModelDrafter(draft.whole()), k=4, max_new_tokens=20).rounds[0]
    assert sum(kept for _, kept in before) < sum(drafted for drafted, _ in before)
    trained(draft, target, steps=300, rate=3e-3, batch=row)
    DistillDraft(draft, target).save(tmp_path)
    out = generate(target, [prompt], ModelDrafter(AutoModelForCausalLM.from_pretrained(tmp_path)), k=4, max_new_tokens=20)
    assert out.tokens[0] == answer[:20]
    assert all(drafted == kept for drafted, kept in out.rounds[0])
    assert out.rounds[0][1] == (4, 4)  # the prefill comes before it
