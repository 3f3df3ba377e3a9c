"""Whether a pair fits, and what training takes: sums by hand, and the training step itself run on tensors without numbers."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen3Config

from draftsmith.distill.chunked import Asked
from draftsmith.distill.memory import predict
from draftsmith.eval.plan.devices import DTYPES, device_named, engine_named
from draftsmith.eval.plan.drafts import Draft, draft_named
from draftsmith.eval.plan.memory import most_batch, most_context, serving
from draftsmith.eval.plan.roofline import Pair
from draftsmith.eval.plan.sizes import size_of
from draftsmith.eval.plan.training import SCHEMES, Held, training

WIDE = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def pair(draft: str, device: str = "dgx-spark", dtype: str = "bf16", layers: int = 6) -> Pair:
    target = size_of(
        LlamaConfig(**WIDE, num_hidden_layers=layers, tie_word_embeddings=True, max_position_embeddings=65536), "target"
    )
    return Pair(target, draft_named(draft, target), DTYPES[dtype], DTYPES[dtype], device_named(device), engine_named("served"))


def test_both_models_both_caches_and_the_system_are_counted() -> None:
    one = pair("layers:2")
    room = serving(one, batch=3, context=1000, k=4)
    assert room.system == 16e9
    assert room.target == one.target.parameters * 2
    assert room.draft == (one.target.parameters - 4 * one.target.blocks[0].dense) * 2
    assert room.target_cache == 3 * 1005 * 6 * (2 * 4 * 32) * 2
    assert room.draft_cache == 3 * 1004 * 2 * (2 * 4 * 32) * 2
    assert room.total == sum(room[:-1])
    assert room.has == 128e9


@pytest.mark.parametrize(("draft", "own", "cached"), [("ngram", 0, 0), ("cost:0.1", 0, 0), ("exit:2", 256**2 + 256, 2)])
def test_what_a_draft_adds(draft: str, own: int, cached: int) -> None:
    room = serving(pair(draft), 1, 100, 4)
    assert room.draft == own * 2
    assert room.draft_cache == cached * 104 * (2 * 4 * 32) * 2


def test_the_largest_batch_and_context_are_the_last_that_fit() -> None:
    one = pair("layers:2")
    batch = most_batch(one, 4096, 4)
    assert serving(one, batch, 4096, 4).fits
    assert not serving(one, batch + 1, 4096, 4).fits
    context = most_context(one, 64, 4)
    assert serving(one, 64, context, 4).fits
    assert context == 65536 or not serving(one, 64, context + 1, 4).fits
    many = most_context(one, 4000, 4)
    assert 0 < many < 65536
    assert not serving(one, 4000, many + 1, 4).fits
    full = one.device.model_copy(update={"memory_gb": 16.001})
    assert most_batch(Pair(**{**vars(one), "device": full}), 1, 1) == 0


def test_quantised_weights_are_those_of_the_blocks() -> None:
    one = pair("layers:2", dtype="int4")
    size = one.target
    room = serving(one, 1, 100, 4)
    assert room.target == size.layers * 0.5625 + (size.parameters - size.layers) * 2
    assert room.draft == size.layers / 3 * 0.5625 + (size.parameters - size.layers) * 2


def rows(one: Pair, processes: int = 4, tokens: int = 1024) -> dict[tuple[str, str, str], Held]:
    return {held[:3]: held for held in training(one, processes, tokens)}  # type: ignore[misc]


def test_each_scheme_by_hand() -> None:
    one = pair("layers:2")
    trained = 2 * one.target.blocks[0].dense + 256**2 + 256
    assert one.draft.trained == trained
    found, block = rows(one), one.target.blocks[0].dense
    by_hand = {
        ("one process", "fp32"): 16 * trained,
        ("one process", "bf16"): 18 * trained,
        ("DDP", "fp32"): 20 * trained,
        ("DDP", "bf16"): 22 * trained,
        ("FSDP2", "fp32"): 4 * trained + 12 * block,
        ("FSDP2", "bf16"): 4 * trained + 6 * block,
        ("ZeRO-2", "fp32"): 4 * trained + 16 * trained / 4 + 4 * trained,
        ("ZeRO-2", "bf16"): 2 * trained + 14 * trained / 4 + 2 * trained,
        ("ZeRO-3", "fp32"): 20 * trained / 4 + 8 * trained,
        ("ZeRO-3", "bf16"): 16 * trained / 4 + 4 * trained,
    }
    assert {scheme for scheme, _ in by_hand} == set(SCHEMES)
    for (scheme, precision), states in by_hand.items():
        for teacher in ("live", "stored"):
            assert found[scheme, precision, teacher].states == pytest.approx(states), (scheme, precision)
        assert ((scheme, precision, "sharded") in found) == (scheme != "one process")
    assert found["DDP", "fp32", "live"].target == one.target.parameters * 2  # whole on every process, however many
    assert found["DDP", "fp32", "stored"].target == one.target.embedding * 2
    size, sharded = one.target, found["DDP", "fp32", "sharded"]
    assert sharded.target == ((size.parameters - size.layers) + size.layers / 4) * 2  # of each block a quarter, the rest whole
    # A draft of one layer keeps less than the target's forward takes, with the two blocks of it that are whole at a time.
    small, whole = (rows(pair("exit:2"))["DDP", "fp32", teacher] for teacher in ("sharded", "live"))
    assert small.activations - whole.activations == 2 * block * 2


def test_nothing_is_trained_of_a_lookup_and_little_of_an_exit() -> None:
    assert training(pair("ngram"), 4, 1024) == []
    held = rows(pair("exit:2"))["one process", "fp32", "stored"]
    assert held.states == 16 * (256**2 + 256)
    assert held.activations == 0  # nothing of a frozen trunk is kept


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("bf16", [False, True])
def test_one_process_against_the_step_itself(family: type, bf16: bool) -> None:
    """States are equal; activations and logits, which are formulas here, within 15 %."""
    target, own = (family(**WIDE, num_hidden_layers=layers, tie_word_embeddings=True) for layers in (3, 2))
    step = predict(target, own, 2, 128, 256, Asked({"forward_kl": 1.0}), bf16=bf16)
    sizes = size_of(target, "t"), size_of(own, "d")
    draft = Draft("d", sizes[1], (0, 0), sizes[1].parameters)
    one = Pair(sizes[0], draft, DTYPES["fp32"], DTYPES["fp32"], device_named("cpu"), engine_named("served"))
    held = rows(one, tokens=256)["one process", "bf16" if bf16 else "fp32", "live"]
    assert held.target == step.target
    # Autocast's copies of the weights are made in the forward, so the step counts them (but the embedding's) with what it keeps.
    copies = 2 * (sizes[1].parameters - sizes[1].embedding) if bf16 else 0
    assert held.states - (2 * draft.trained if bf16 else 0) == step.draft + step.gradients + step.moments
    assert held.activations == pytest.approx(step.activations - copies, rel=0.15)
    assert held.logits == pytest.approx(step.logits, rel=0.1)
