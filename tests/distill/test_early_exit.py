"""What exits are taught: as a draft is, from one forward of a trunk that is never touched; and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.distill import LOSSES, DistillExits, collate
from draftsmith.distill.batch import Example
from draftsmith.distill.block_length import block_length
from draftsmith.distill.early_exit import Exits
from draftsmith.distill.head import last_hidden
from draftsmith.distill.losses import acceptance
from draftsmith.distill.making.stand_alone import stand_alone
from draftsmith.distill.warm import exit_start
from draftsmith.distill.warm.exit_start import set_map, start_exits
from draftsmith.distill.warm.fitting import Fit
from draftsmith.distill.warm.ridge import Exit
from draftsmith.specdec import load_drafter
from draftsmith.specdec.drafters.early_exit import exit_model
from draftsmith.specdec.drafters.exit_heads import AdapterExit, ExitSettings, make_head
from draftsmith.specdec.models import blocks
from draftsmith.train.loop import evaluate
from exits import KINDS, LAST, bits, moved, some_head
from tiny import FAMILIES, batches, tiny

ROWS = [([5, 9, 11, 4, 2], 3), ([7, 8, 2], 1), ([3, 3, 20, 21, 22, 23, 24, 2], 6)]
THREE = [KINDS["adapter"], ExitSettings(2, "block", 8), LAST["lora"]]


def taught(target: Any, exits: list[ExitSettings] = THREE, **more: Any) -> DistillExits:
    objective = DistillExits(target, exits, **more)
    for head in objective.exits.by_layer().values():
        moved(head)
    return objective


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_what_will_draft(family: str) -> None:
    """The states that training makes beside the trunk are those of the exit as a model, for every kind; packed rows read no other."""
    target = tiny(family)
    alone = collate([([5, 9, 11, 4, 8, 2], 3), ([7, 8, 30, 31, 2], 2)])
    packed = collate([[Example([5, 9, 11, 4, 8, 2], ((3, 6),)), Example([7, 8, 30, 31, 2], ((2, 5),))]])
    for kind, asked in KINDS.items():
        exits = taught(target, [asked]).exits.eval()
        with torch.no_grad():
            found = exits(exits.watch(alone), alone)[0]
            wanted = last_hidden(exit_model(target, asked.layer, exits.by_layer()[asked.layer]), alone.ids)[alone.scored]
            assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4), kind
            if family in ("llama", "gpt2", "qwen3"):
                assert torch.allclose(exits(exits.watch(packed), packed)[0], wanted, atol=1e-3, rtol=1e-3), kind


def test_training_moves_the_heads_and_not_a_bit_of_the_target() -> None:
    target, batch = tiny(), collate(ROWS)
    ids = torch.tensor([[5, 9, 11, 4]])
    before, logits = bits(target), target(input_ids=ids).logits.detach().numpy().tobytes()
    objective = DistillExits(target, THREE)
    heads = bits(objective.exits)
    optimizer = torch.optim.AdamW([one for one in objective.trainable.parameters() if one.requires_grad], lr=1e-2, weight_decay=0.1)
    first = float(objective.loss(batch).total.detach())
    for _ in range(6):
        optimizer.zero_grad()
        objective.loss(batch).total.backward()
        assert all(one.grad is not None for one in objective.trainable.parameters())
        optimizer.step()
    assert float(objective.loss(batch).total.detach()) < 0.7 * first
    assert bits(target) == before
    assert target(input_ids=ids).logits.detach().numpy().tobytes() == logits
    assert all(one.grad is None for one in target.parameters())
    moved_ones = {name for name, value in bits(objective.exits).items() if value != heads[name]}
    assert moved_ones == heads.keys(), "every weight of every head learns"
    assert sum(map(len, heads.values())) < sum(map(len, before.values())), "a checkpoint holds no weight of the target"


@pytest.mark.parametrize("family, precision", [("llama", "no"), ("llama", "bf16"), ("gpt2", "no")])
def test_beside_a_target_in_half_precision_heads_learn_in_float32(family: str, precision: str) -> None:
    target = tiny(family).to(torch.bfloat16)
    objective = DistillExits(target, THREE)
    if precision == "bf16":  # what an accelerator of that precision does to a module
        forward = torch.autocast("cpu", torch.bfloat16)(objective.exits.forward)
        objective.exits.forward = convert_outputs_to_fp32(forward)  # type: ignore[method-assign]
    loss = objective.loss(collate(ROWS)).total
    loss.backward()
    assert torch.isfinite(loss)
    for one in objective.trainable.parameters():
        assert one.dtype == torch.float32
        assert one.grad is not None
        assert torch.isfinite(one.grad).all()
    assert {one.dtype for one in target.parameters()} == {torch.bfloat16}


def test_the_trunk_runs_once_a_batch_however_many_exits_there_are() -> None:
    target = tiny()
    objective = DistillExits(target, [ExitSettings(1, "block", 8), KINDS["full"], LAST["adapter"]])
    calls = [0, 0, 0]
    for at, layer in enumerate(blocks(target)[1]):
        layer.register_forward_hook(lambda *_, at=at: calls.__setitem__(at, calls[at] + 1))
    for mode in (True, False):
        objective.trainable.train(mode)
        objective.loss(collate(ROWS))
    assert calls == [2, 2, 2]
    assert not any(one._forward_pre_hooks for one in target.modules())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_chunks_and_weights_equal_the_whole(family: str) -> None:
    target, batch = tiny(family), collate(ROWS)
    losses, weights = {"forward_kl": 1.0, "total_variation": 2.0}, [3.0, 1.0, 4.0]
    objective = taught(target, loss=losses, weights=weights, chunk=2)
    whole = torch.zeros(())
    for asked, weight in zip(THREE, weights, strict=True):
        view = exit_model(target, asked.layer, objective.exits.by_layer()[asked.layer])
        q, p = view(input_ids=batch.ids).logits[batch.scored], target(input_ids=batch.ids).logits[batch.scored].detach()
        for name, times in losses.items():
            whole = whole + weight / 8 * times * LOSSES[name](q, p).sum()
    whole.backward()
    wanted = {name: one.grad.clone() for name, one in objective.trainable.named_parameters()}
    objective.trainable.zero_grad()
    loss = objective.loss(batch)
    loss.total.backward()
    assert abs(loss.total.item() - whole.item()) < 1e-4 * abs(whole.item())
    for name, one in objective.trainable.named_parameters():
        assert torch.allclose(one.grad, wanted[name], atol=1e-4, rtol=1e-3), name
    empty = objective.loss(collate([([9, 9], 2)]))
    empty.total.backward()  # a rank with nothing to score still takes part
    assert empty.total.item() == float(empty.metrics["scored"]) == 0


def test_few_ids_and_a_support_say_what_they_say_for_a_draft(tmp_path: Path) -> None:
    target, batch, ids = tiny(), collate(ROWS), torch.tensor([2, 4, 8, 9, 24, 40])
    objective = taught(target, [KINDS["adapter"]], ids=ids)
    q = exit_model(target, 1, objective.exits.by_layer()[1])(input_ids=batch.ids).logits[batch.scored][:, ids].log_softmax(-1)
    p = target(input_ids=batch.ids).logits[batch.scored].softmax(-1)
    shared = torch.minimum(q.exp(), p[:, ids]).sum().detach()
    assert abs(float(objective.loss(batch).metrics["acceptance"]) - float(shared)) < 1e-4
    objective.save(tmp_path)
    assert load_drafter(tmp_path, target).ids == 6  # type: ignore[attr-defined]
    narrow = taught(target, [KINDS["adapter"]], support=ids)
    inside = (p[:, ids] * ((p[:, ids] / p[:, ids].sum(-1, keepdim=True)).log() - q)).sum(-1) / p[:, ids].sum(-1)
    assert abs(float(narrow.loss(batch).total) - float(inside.sum())) < 1e-3
    whole = float(taught(target, [KINDS["adapter"]]).loss(batch).metrics["acceptance"])
    assert abs(float(narrow.loss(batch).metrics["acceptance"]) - whole) < 1e-4, "figures see every id"
    with pytest.raises(ValueError, match="that the draft cannot say"):
        DistillExits(target, THREE, support=torch.tensor([3]), ids=ids)


def test_the_closed_form_start_beats_none_and_what_is_better_already_is_kept() -> None:
    target = tiny()
    exits = [ExitSettings(1, "adapter", None), ExitSettings(2, "adapter", 8), LAST["lora"]]
    objective = DistillExits(target, exits)
    last = bits(objective.exits.by_layer()[3])
    started = start_exits(objective, batches(32), batches(16, seed=1))
    for layer, gain in ((1, 0.02), (2, 0.01)):
        assert started[layer].after > started[layer].before + gain, layer
        assert started[layer].strength is not None
    assert started[3].before == started[3].after > 0.999
    assert started[3].strength is None
    assert bits(objective.exits.by_layer()[3]) == last
    block = DistillExits(target, [ExitSettings(1, "block", None)])
    two = DistillExits(target, [ExitSettings(2, "adapter", None)])
    after = [start_exits(one, batches(32), batches(16, seed=1)) for one in (block, two)]
    assert after[0][1] == after[1][2], "a block begins as the next layer"


def test_a_map_that_held_out_rows_find_worse_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny()
    objective = DistillExits(target, [LAST["adapter"], KINDS["adapter"]])
    before = bits(objective.exits)
    moments = torch.eye(32, dtype=torch.float64)
    fit = Fit(0.1, "nothing", 1.0, 0.0, 1.0, 0.0, 9, 0.0)
    monkeypatch.setattr(exit_start, "exits", lambda *_: {layer: Exit(-torch.eye(32), fit, moments) for layer in (1, 3)})
    started = start_exits(objective, [], batches(8))
    assert all(one.strength is None and one.before == one.after for one in started.values())
    assert bits(objective.exits) == before


def test_a_map_of_low_rank_is_the_nearest_for_the_states_that_were_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 32, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 5, 32)
    change = torch.randn(32, 32, generator=generator, dtype=torch.float64)
    wanted = torch.eye(32) + change

    def left(map_: torch.Tensor) -> float:
        return float((x @ (map_.double() - wanted).T).pow(2).sum())

    out = make_head(tiny(), ExitSettings(1, "adapter", 5))
    assert isinstance(out, AdapterExit)
    set_map(out, wanted, x.T @ x)
    singular = torch.linalg.svdvals(x @ change.T)
    assert left(out.square().detach()) == pytest.approx(float(singular[5:].pow(2).sum()), rel=1e-3)  # Eckart-Young
    u, s, v = torch.linalg.svd(change)
    assert left(out.square().detach()) < left(torch.eye(32) + u[:, :5] * s[:5] @ v[:5]) * 0.9
    nothing = make_head(tiny(), ExitSettings(1, "adapter", 5))
    before = bits(nothing)
    set_map(nothing, torch.eye(32), x.T @ x)
    assert bits(nothing) == before, "or both sides would be 0, and nothing could be learned"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exit_as_a_model_of_its_own_says_the_same(family: str, kind: str, tmp_path: Path) -> None:
    target, ids = tiny(family), torch.tensor([[5, 9, 11, 4]])
    before = bits(target)
    layer, head = some_head(target, kind)
    with torch.no_grad():
        wanted = exit_model(target, layer, head)(input_ids=ids).logits
        stand_alone(target, layer, head).save_pretrained(tmp_path)
        found: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.allclose(found(input_ids=ids).logits, wanted, atol=1e-3, rtol=1e-3)
    assert len(blocks(found)[1]) == layer + (kind == "block")
    assert bits(target) == before


def test_figures_are_of_each_exit_and_means_by_their_shares(tmp_path: Path) -> None:
    target, batch = tiny(), collate(ROWS)
    objective = taught(target, weights=[1.0, 1.0, 2.0])
    training = objective.loss(batch)
    assert training.parts is None
    means = evaluate(objective, [batch, batch], Accelerator(cpu=True), k=2)
    scored, p = batch.scored, target(input_ids=batch.ids).logits[batch.scored]
    for asked in THREE:
        q = exit_model(target, asked.layer, objective.exits.by_layer()[asked.layer].eval())(input_ids=batch.ids).logits[scored]
        one = means["parts"][str(asked.layer)]
        assert one["acceptance"] == pytest.approx(float(acceptance(q, p).mean()), abs=1e-5)
        assert float(training.metrics[f"acceptance after {asked.layer}"]) == pytest.approx(6 * one["acceptance"], abs=1e-4)
        runs = acceptance(q, p).split([2, 2, 2])
        assert one["block_length"] == pytest.approx(block_length(runs, 2), abs=1e-5)
    for what in ("acceptance", "agreement", "block_length", "greedy_block_length"):
        every = [means["parts"][name][what] for name in ("1", "2", "3")]
        assert means[what] == pytest.approx(0.25 * every[0] + 0.25 * every[1] + 0.5 * every[2])
    assert means["scored"] == 12
    objective.save(tmp_path / "a")
    objective.figures = {name: {"block_length": length} for name, length in (("1", 1.9), ("2", 2.0), ("3", 2.1))}
    assert objective.default() == 1, "a little more is not worth twice the layers"
    objective.figures = {name: {"block_length": length} for name, length in (("1", 1.1), ("2", 4.5), ("3", 4.6))}
    assert objective.default() == 2
    objective.save(tmp_path / "b")
    assert load_drafter(tmp_path / "b", target).layer == 2  # type: ignore[attr-defined]
    assert set(load_file(tmp_path / "b" / "heads.safetensors")) == {
        *(name.removeprefix("heads.") for name in objective.exits.state_dict()),
        "target.sample",
    }


def test_exits_that_make_no_sense_are_refused() -> None:
    target = tiny()
    for exits, message in (([], "name at least one"), ([ExitSettings(1), ExitSettings(1, "block", 8)], "each layer at most once")):
        with pytest.raises(ValueError, match=message):
            Exits(target, exits)
    for weights in ([1.0], [1.0, 0.0, 1.0]):
        with pytest.raises(ValueError, match="3 exits need as many weights above 0"):
            DistillExits(target, THREE, weights=weights)
    with pytest.raises(ValueError, match="did you mean 'forward_kl'"):
        DistillExits(target, THREE, "forward_lk")
