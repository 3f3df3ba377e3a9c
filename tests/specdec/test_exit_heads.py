"""Heads of exits: lossless whatever they say, nothing of the target is changed or copied, and what is saved serves that target alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftsmith.specdec import CombinedDrafter, EarlyExitDrafter, NgramDrafter, Sampling, generate, load_drafter
from draftsmith.specdec.drafters.early_exit import exit_model, exit_view
from draftsmith.specdec.drafters.exit_costs import added_bytes, memory_bound_speed_up, share_of_a_step
from draftsmith.specdec.drafters.exit_files import places, sample, write_exits
from draftsmith.specdec.drafters.exit_heads import HEADS, BlockExit, ExitSettings, LoraExit, make_head
from draftsmith.specdec.models import blocks
from draftsmith.specdec.prepare import prepare_for_decoding
from exits import KINDS, LAST, bits, moved, some_head
from tiny import FAMILIES, noisy, plain_greedy, tiny

PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25]]
IDS = torch.tensor([[5, 9, 11, 4, 8, 30, 31]])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets_own_with_every_kind_of_head(family: str) -> None:
    target = tiny(family)
    before, frozen = bits(target), [one.requires_grad for one in target.parameters()]
    wanted = [plain_greedy(target, prompt, 12) for prompt in PROMPTS]
    for kind in KINDS:
        layer, head = some_head(target, kind)
        drafter = EarlyExitDrafter(target, layer, head)
        assert generate(target, PROMPTS, drafter, k=3, max_new_tokens=12).tokens == wanted, kind
    assert bits(target) == before
    assert [one.requires_grad for one in target.parameters()] == frozen
    assert not any("lora" in name for name, _ in target.named_modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exit_at_the_last_layer_is_the_target_as_it_begins_and_no_longer_once_moved(family: str) -> None:
    target = tiny(family)
    with torch.no_grad():
        wanted = target(input_ids=IDS).logits
        for kind, asked in LAST.items():
            head = make_head(target, asked)
            view = exit_model(target, asked.layer, head).eval()
            assert torch.equal(view(input_ids=IDS).logits, wanted), kind
            out = generate(
                target, [PROMPTS[0]], EarlyExitDrafter(target, asked.layer, head), k=3, max_new_tokens=9, how=Sampling(1.0)
            )
            assert all(drafted == accepted for drafted, accepted in out.rounds[0]), kind
            moved(head)
            assert not torch.allclose(view(input_ids=IDS).logits, wanted, atol=1e-2), kind


def test_an_adapter_maps_what_a_layer_says_to_what_the_output_head_reads_step_by_step() -> None:
    target = tiny()
    for kind in ("adapter", "full"):
        layer, head = some_head(target, kind)
        hidden = target(input_ids=IDS, output_hidden_states=True).hidden_states[layer]
        wanted = exit_model(target, layer, head)(input_ids=IDS).logits
        assert torch.allclose(target.lm_head(head(hidden)), wanted, atol=1e-5)
        assert torch.allclose(target.lm_head(head(hidden[:, 3:4])), wanted[:, 3:4], atol=1e-5), "no state from one step to the next"
        assert torch.allclose(head.norm(hidden) @ head.square().T, head(hidden), atol=1e-5)
    assert {kind: (make_head(target, asked).own_cache, make_head(target, asked).own_trunk) for kind, asked in KINDS.items()} == {
        "adapter": (False, False), "full": (False, False), "block": (True, False), "lora": (True, True),
    }  # fmt: skip
    assert HEADS.keys() == {"adapter", "block", "lora"}


def test_only_the_heads_are_added_to_the_target() -> None:
    target = tiny()
    theirs = {one.data_ptr() for one in target.parameters()}
    for kind, asked in KINDS.items():
        head = make_head(target, asked)
        assert not theirs & {one.data_ptr() for one in head.parameters()}, kind
        new = {id(one): one for one in exit_model(target, asked.layer, head).parameters() if one.data_ptr() not in theirs}
        assert added_bytes([head]) == sum(4 * one.numel() for one in new.values()) > 0, kind
    block, lora = (make_head(target, KINDS[kind]) for kind in ("block", "lora"))
    assert isinstance(block, BlockExit)
    assert isinstance(lora, LoraExit)
    layer, rows = sum(one.numel() for one in blocks(target)[1][0].parameters()), 61 * 32
    extra = 32 + 2 * 8 * 32
    assert added_bytes([block]) == 4 * (layer + extra)
    assert share_of_a_step(target, 1, make_head(target, KINDS["adapter"])) == (layer + extra + rows) / (3 * layer + rows)
    assert share_of_a_step(target, 1, block, ids=10) == (2 * layer + extra + 320) / (3 * layer + rows)
    assert memory_bound_speed_up(3.0, 4, 0.25) == 1.5


def test_the_same_settings_make_the_same_head_and_no_random_state_is_touched() -> None:
    target = tiny()
    for asked in KINDS.values():
        torch.manual_seed(1)
        first = bits(make_head(target, asked))
        drawn = torch.rand(1)
        torch.manual_seed(1)
        assert torch.equal(drawn, torch.rand(1))
        assert bits(make_head(target, asked)) == first


def test_exits_that_a_target_cannot_have_are_refused() -> None:
    target = tiny()
    lora = {"rank": 2, "alpha": 4, "targets": ["nothing"]}
    for asked, message in (
        (ExitSettings(4), r"layers 1\.\.3 for it"),
        (ExitSettings(0), r"layers 1\.\.3"),
        (ExitSettings(3, "block"), r"layers 1\.\.2 for it; its block stands in the place"),
        (ExitSettings(1, "adaptor"), "did you mean 'adapter'"),
        (ExitSettings(1, rank=32), "take 1..31, or full"),
        (ExitSettings(1, "lora", 8), "head lora needs lora settings"),
        (ExitSettings(1, "block", 8, lora), "no other takes them"),
        (ExitSettings(1, "lora", 8, lora), "adapters on nothing asked; the linear layers of this target are down_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            make_head(target, asked)


def test_a_fault_while_drafting_leaves_the_target_whole() -> None:
    target = tiny()
    layer, head = some_head(target, "adapter")
    broken = EarlyExitDrafter(target, layer, head)
    head.norm = torch.nn.LayerNorm(7)  # it cannot take the states
    with pytest.raises(RuntimeError):
        generate(target, PROMPTS, broken, k=3, max_new_tokens=9)
    assert generate(target, [PROMPTS[0]], max_new_tokens=12).tokens == [plain_greedy(target, PROMPTS[0], 12)]


def test_prepared_trimmed_or_behind_a_lookup_a_head_stays_lossless() -> None:
    target = tiny()
    wanted = [plain_greedy(target, prompt, 12) for prompt in PROMPTS]
    prepare_for_decoding(target)
    for kind in KINDS:
        layer, head = some_head(target, kind)
        drafter = EarlyExitDrafter(target, layer, head, ids=torch.arange(1, 61, 2))
        prepare_for_decoding(drafter.model)
        assert drafter.ids == 30
        for one in (drafter, CombinedDrafter(NgramDrafter(), drafter, min_match=1)):
            assert generate(target, PROMPTS, one, k=3, max_new_tokens=12).tokens == wanted, kind


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_folder_of_exits_gives_back_each_of_them(family: str, tmp_path: Path) -> None:
    target = tiny(family)
    pairs = [(asked, moved(make_head(target, asked))) for asked in (KINDS["block"], KINDS["lora"], LAST["adapter"])]
    write_exits(tmp_path / "heads", target, pairs, default=2, told={1: {"acceptance": 0.5}})
    assert {one.name for one in (tmp_path / "heads").iterdir()} == {"drafter.json", "heads.safetensors"}
    for asked, head in pairs:
        drafter = load_drafter(f"{tmp_path / 'heads'}:{asked.layer}", target)
        assert isinstance(drafter, EarlyExitDrafter)
        assert bits(drafter.head) == bits(head)
        with torch.no_grad():
            wanted = exit_model(target, asked.layer, head.eval())(input_ids=IDS).logits
            assert torch.equal(drafter.model(input_ids=IDS).logits, wanted)
    assert load_drafter(tmp_path / "heads", target).layer == 2  # type: ignore[attr-defined]
    both = load_drafter(f"ngram:2+{tmp_path / 'heads'}:3", target)
    assert isinstance(both, CombinedDrafter)
    assert both.drafter.layer == 3  # type: ignore[attr-defined]


def test_a_target_is_known_by_all_of_its_weights_however_large() -> None:
    assert places(28_311_552).tolist()[-1] == 28_311_551  # SmolLM2's embedding
    assert places(1).tolist() == [0] * 8
    assert places(15).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    target = tiny()
    assert len(sample(target)) == 8 * len(list(target.parameters()))


def test_exits_of_another_target_or_a_broken_folder_are_refused(tmp_path: Path) -> None:
    target, heads = tiny(), tmp_path / "heads"
    write_exits(heads, target, [(KINDS["adapter"], make_head(target, KINDS["adapter"]))], default=1, about={"target": "one"})
    for other in (noisy(target, 1e-4), tiny(seed=1), tiny("qwen3"), tiny(num_hidden_layers=2)):
        with pytest.raises(ValueError, match="holds exits of another target"):
            load_drafter(heads, other)
    half = load_drafter(heads, tiny().to(torch.bfloat16))
    assert {one.dtype for one in half.head.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    write_exits(tmp_path / "half", tiny().to(torch.bfloat16), [(KINDS["adapter"], make_head(target, KINDS["adapter"]))], default=1)
    load_drafter(tmp_path / "half", target)
    with pytest.raises(ValueError, match="it has exits after 1"):
        load_drafter(f"{heads}:2", target)
    about = json.loads((heads / "drafter.json").read_text())
    assert about["target"] == "one"
    about["settings"]["exits"][0]["rank"] = 4
    (heads / "drafter.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"does not hold the exit that drafter\.json says"):
        load_drafter(heads, target)
    (heads / "drafter.json").write_text(json.dumps({"kind": "exits", "settings": {"default": 1}}))
    with pytest.raises(ValueError, match="do not fit a drafter of kind exits"):
        load_drafter(heads, target)
    (heads / "drafter.json").write_text(json.dumps({"kind": "ngram"}))
    with pytest.raises(ValueError, match="a layer is named of a folder of exits, and this one holds a ngram"):
        load_drafter(f"{heads}:1", target)
    (heads / "drafter.json").write_text(json.dumps(about))
    (heads / "heads.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="is damaged"):
        load_drafter(heads, target)
    (heads / "heads.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="names its heads"):
        load_drafter(heads, target)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_where_the_head_is_the_targets_own_transformers_early_exit_drafts_the_same_model(family: str) -> None:
    target = tiny(family)
    ids = torch.tensor([PROMPTS[0]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    alone = target.generate(ids, **settings)
    assert torch.equal(target.generate(ids, assistant_early_exit=2, **settings), alone)
    ours = generate(target, [PROMPTS[0]], EarlyExitDrafter(target, 2), k=3, max_new_tokens=12, eos=2)
    assert ours.tokens[0] == alone[0, len(PROMPTS[0]) :].tolist()
    with torch.no_grad():
        view = exit_view(target, 2)(input_ids=IDS).logits
        target.model.config.num_hidden_layers = 2  # what transformers does while it drafts
        assert torch.equal(target(input_ids=IDS).logits, view)
