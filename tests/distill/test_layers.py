"""Layers by name, by influence, and by what held-out acceptance says after a short calibration."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from draftsmith.distill import Batch, LiveTeacher, collate
from draftsmith.distill.making.layers import choose_layers, named_layers
from draftsmith.distill.making.observe import influence
from draftsmith.specdec.models import blocks
from tiny import tiny


def rows(n: int, seed: int = 0) -> list[tuple[list[int], int]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(3, 61, (20,), generator=generator).tolist(), 4) for _ in range(n)]


def idle(layers: list[int]) -> PreTrainedModel:
    """A target of six layers of which `layers` write nothing."""
    target = tiny(num_hidden_layers=6)
    with torch.no_grad():
        for number in layers:
            layer = blocks(target)[1][number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def test_named_sets_and_what_is_none() -> None:
    assert named_layers(30, "first:4") == [0, 1, 2, 3]
    assert named_layers(30, "first") == [0, 1, 2, 3]  # an eighth
    assert named_layers(6, "spread") == [0]
    assert named_layers(30, "spread:4") == [0, 10, 19, 29]
    assert named_layers(30, "ends:4") == [0, 1, 2, 29]
    assert named_layers(30, "ends:8") == [0, 1, 2, 3, 4, 5, 28, 29]
    assert named_layers(4, "ends:1") == [0]
    for total in (1, 2, 5, 30):
        for name in ("first", "spread", "ends"):
            for n in range(1, total + 1):
                layers = named_layers(total, f"{name}:{n}")
                assert layers == sorted(set(layers))
                assert len(layers) == n
                assert layers[0] >= 0
                assert layers[-1] < total
    for wrong, says in (
        ("last:4", "did you mean|not one of"),
        ("first:0", "first:4"),
        ("first:x", "first:4"),
        ("first:7", "7 layers asked, and the target has 6"),
        ("auto:2", "use choose_layers"),
    ):
        with pytest.raises(ValueError, match=says):
            named_layers(6, wrong)


def test_influence_is_one_minus_the_cosine_of_what_goes_in_and_out_at_real_tokens() -> None:
    target = tiny(num_hidden_layers=4)
    batch = collate([([5, 9, 11, 4, 6], 3), ([7, 8, 6], 1)])  # the pad id is embedded as zeros, which have no direction
    with torch.no_grad():
        states = target(input_ids=batch.ids, output_hidden_states=True).hidden_states
    found = influence(target, [batch])
    for number in range(3):  # the last of transformers' states is normed, so the last layer's can't be read from it
        before, after = states[number][batch.real].double(), states[number + 1][batch.real].double()
        cosine = (before * after).sum(-1) / before.norm(dim=-1) / after.norm(dim=-1)
        assert abs(found[number] - float((1 - cosine).mean())) < 1e-5
    assert influence(idle([1]), [batch])[1] < 1e-6
    with pytest.raises(ValueError, match="no token to calibrate"):
        influence(target, [])


class Counting(LiveTeacher):
    asked = 0

    def hidden(self, batch: Batch) -> torch.Tensor:
        self.asked += 1
        return super().hidden(batch)


@pytest.mark.parametrize("steps", [0, 3])
def test_auto_finds_the_layers_that_do_the_work_and_says_cost_and_table(steps: int) -> None:
    target = idle([1, 2, 4])
    teacher = Counting(target)
    batches, held_out = [collate(rows(8)), collate(rows(8, 1))], [collate(rows(8, 2))]
    said: list[str] = []
    choice = choose_layers(target, teacher, "auto:3", batches, held_out, steps=steps, learning_rate=1e-5, say=said.append)
    assert choice.layers == [0, 3, 5]
    assert choice.table[0].name == "influence"
    assert choice.table[0].acceptance > 0.99
    assert {tuple(one.layers) for one in choice.table} == {(0, 1, 2), (0, 2, 5), (0, 1, 5), (0, 3, 5)}
    assert [one.acceptance for one in choice.table] == sorted((one.acceptance for one in choice.table), reverse=True)
    assert all(one.acceptance > one.before for one in choice.table[1:])
    assert "4 candidates of 3 of 6 layers, 256 tokens and 128 held out" in said[0]
    assert len(said) == 2 + len(choice.table)
    assert teacher.asked == 3  # once a batch, not once a candidate
    same = choose_layers(target, teacher, "auto:3", batches, held_out, steps=steps, learning_rate=1e-5, say=said.append)
    assert same.layers == choice.layers


def test_sets_that_are_the_same_are_tried_once_and_a_list_or_a_name_costs_nothing() -> None:
    target = tiny()
    teacher = Counting(target)
    choice = choose_layers(target, teacher, "auto:2", [collate(rows(4))], [collate(rows(4, 1))], say=lambda line: None)
    assert len({tuple(one.layers) for one in choice.table}) == len(choice.table) < 4
    assert any("spread = ends" in one.name for one in choice.table)
    before = teacher.asked
    assert choose_layers(target, teacher, [2, 0]) == ([2, 0], [])
    assert choose_layers(target, teacher, "ends:2") == ([0, 2], [])
    assert teacher.asked == before
    with pytest.raises(ValueError, match=r"layers 0\.\.2"):
        choose_layers(target, teacher, [0, 3])
    with pytest.raises(ValueError, match="calibrates on rows"):
        choose_layers(target, teacher, "auto:2", [collate(rows(4))], [])


def test_calibration_stops_at_the_tokens_asked() -> None:
    target = tiny()
    teacher = Counting(target)
    batches = [collate(rows(2, seed)) for seed in range(20)]  # 32 scored tokens each
    said: list[str] = []
    choose_layers(target, teacher, "auto:2", batches, batches[:10], tokens=100, say=said.append)
    assert "128 tokens and 32 held out" in said[0]


def test_rows_that_only_pad_the_targets_head_are_no_outcome() -> None:
    target = tiny(vocab_size=64)
    choice = choose_layers(
        target, LiveTeacher(target, real=61), "auto:2", [collate(rows(4))], [collate(rows(4, 1))], steps=1, say=lambda line: None
    )
    assert 0 < choice.table[0].acceptance <= 1


def test_processes_that_try_together_cut_what_the_first_one_found() -> None:
    target, said, asked = tiny(num_hidden_layers=6), list[str](), list[object]()

    def first(found: list[object]) -> list[object]:
        """What another process says of the layers of most influence, and of which set is best."""
        asked.append(found)
        return [1, 4] if len(asked) == 1 else found[::-1]

    choice = choose_layers(
        target, LiveTeacher(target), "auto:2", [collate(rows(4))], [collate(rows(4, 1))], say=said.append, agree=first
    )
    tried = {one.name: one.layers for one in choice.table}
    assert tried["influence"] == [1, 4]
    assert choice.table == asked[1][::-1]  # type: ignore[index]
    assert choice.layers == choice.table[0].layers
    assert choice.table[0].acceptance < choice.table[-1].acceptance
