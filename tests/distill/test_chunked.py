"""The chunked loss is that of the model's own logits, whatever its head does to them, and nothing a vocabulary wide outlives a chunk."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from draftsmith.distill import LOSSES, Batch, CutDraft, Dense, DistillDraft, collate
from draftsmith.distill.chunked import Asked, columns, judged, scored_loss
from draftsmith.distill.head import Head, check_head
from draftsmith.distill.held import Live
from draftsmith.distill.losses import OF_DATA, loss_named
from tiny import FAMILIES, noisy, tiny

NAMES = [*LOSSES, "jsd:0.1", "lk_lambda:10", "hass:3"]
ROWS = [([5, 9, 11, 4, 2], 3), ([7, 8, 2], 1), ([3, 3, 20, 21, 22, 23, 24, 2], 4)]
SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Each family of transformers' that does something to its logits, in its own way: model type, its settings, scale, cap.
HEADS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "llama": ({"tie_word_embeddings": False}, 1, None),
    "phi": ({}, 1, None),  # a head with a bias
    "cohere": ({"logit_scale": 0.25}, 0.25, None),
    "cohere2": ({"logit_scale": 0.25}, 0.25, None),
    "granite": ({"logits_scaling": 3.0}, 1 / 3, None),
    "granitemoe": ({"logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2}, 1 / 3, None),
    "hyperclovax": ({"logits_scaling": 3.0}, 3, None),
    "minicpm3": (
        {"dim_model_base": 8, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
         "head_dim": 4, "num_key_value_heads": 4},
        1 / 4, None,
    ),
    "gemma2": ({"final_logit_softcapping": 5.0}, 1, 5.0),
    "gemma3_text": ({"final_logit_softcapping": 5.0}, 1, 5.0),
    "nanochat": ({"final_logit_softcapping": 5.0}, 1, 5.0),
    "vaultgemma": ({"final_logit_softcapping": 5.0}, 1, 5.0),
    "recurrent_gemma": ({"logits_soft_cap": 5.0, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16}, 1, 5.0),
    "falcon_h1": (
        {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
        0.25, None,
    ),
}  # fmt: skip


def model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **{**SMALL, **HEADS[family][0], **changes})
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(20)  # logits that are large enough for a cap to bend
        for name, one in made.named_parameters():
            if name.endswith("head.bias"):
                one.normal_()
    return made


def naive(name: str, logits: Tensor, wanted: Tensor, said: Tensor, temperature: float = 1.0) -> Tensor:
    """The loss of whole logits, as anybody would write it."""
    law = torch.full_like(wanted, -torch.inf).scatter(-1, said[:, None], 0.0) if name in OF_DATA else wanted
    return temperature**2 * loss_named(name)(logits / temperature, law / temperature).sum()


def alike(found: Tensor, wanted: Tensor, within: float = 1e-6) -> bool:
    return float((found - wanted).abs().max()) <= within * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("family", HEADS)
def test_chunks_are_the_loss_of_the_models_own_logits_for_every_loss(family: str) -> None:
    target = model(family)
    draft = noisy(target, 0.3)
    head = Head(draft)
    assert (head.scale, head.cap) == (pytest.approx(HEADS[family][1]), HEADS[family][2])
    if head.cap is not None:
        logits = target(input_ids=torch.tensor([[5, 9, 11]])).logits
        assert float(logits.abs().max()) > 0.5 * head.cap, "a cap that bends nothing would test nothing"
    batch = collate(ROWS)
    objective = DistillDraft(draft, target, dict.fromkeys(NAMES, 1.0), chunk=4)
    logits, wanted = draft(input_ids=batch.ids).logits[batch.scored], target(input_ids=batch.ids).logits[batch.scored].detach()
    said = batch.ids.roll(-1, 1)[batch.scored]
    parameters = dict(draft.named_parameters())
    for name in NAMES:
        objective.asked = objective.asked._replace(weights={name: 1.0})
        total = objective.loss(batch).total
        whole = naive(name, logits, wanted, said)
        assert alike(total.detach(), whole.detach()), name
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        wanted_ = torch.autograd.grad(whole, list(parameters.values()), allow_unused=True, retain_graph=True)
        largest = max(float(one.abs().max()) for one in wanted_ if one is not None)
        for which, one, other in zip(parameters, found, wanted_, strict=True):
            assert (one is None) == (other is None), (name, which)
            if one is not None and other is not None:
                assert float((one - other).abs().max()) <= 1e-5 * largest, (name, which)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_trained_head_gets_its_gradient_tied_or_not(tied: bool, chunk: int) -> None:
    target = model("gemma2")
    draft = noisy(model("gemma2", tie_word_embeddings=tied), 0.3)
    assert (draft.get_output_embeddings().weight is draft.get_input_embeddings().weight) == tied
    batch = collate(ROWS)
    weights = {"lk_lambda": 1.0, "ce_data": 0.1}
    total = DistillDraft(draft, target, weights, chunk=chunk).loss(batch).total
    logits, wanted = draft(input_ids=batch.ids).logits[batch.scored], target(input_ids=batch.ids).logits[batch.scored].detach()
    said = batch.ids.roll(-1, 1)[batch.scored]
    whole = torch.stack([weight * naive(name, logits, wanted, said) for name, weight in weights.items()]).sum()
    assert alike(total, whole)
    own = draft.get_output_embeddings().weight
    found, other = (torch.autograd.grad(one, own)[0] for one in (total, whole))
    assert float(other.abs().max()) > 1e-2
    assert alike(found, other)


def test_a_head_over_some_ids_is_the_head() -> None:
    hidden, ids = torch.randn(5, 32), torch.tensor([0, 7, 8, 60])
    for family in ("phi", "cohere", "gemma2", "granite"):
        head = Head(model(family))
        assert torch.allclose(head.over(ids)(hidden), head(hidden)[:, ids], atol=1e-5), family
        logits, learned = head.rows_of(ids)
        (found,) = torch.autograd.grad(logits(hidden).sum(), head.linear.weight)
        assert torch.allclose(found, torch.autograd.grad(head(hidden)[:, ids].sum(), head.linear.weight)[0], atol=1e-5), family
        assert [one.shape[0] for one in learned] == [4] * (2 if family == "phi" else 1)


def test_rows_that_pad_a_head_get_no_mass() -> None:
    padded = model("cohere")
    head = Head(padded, 50)
    check_head(padded, head)
    hidden = torch.randn(5, 32)
    assert torch.equal(head(hidden), Head(padded)(hidden)[:, :50])
    with pytest.raises(ValueError, match="62 real ids asked of CohereForCausalLM, whose head has 61 rows"):
        Head(padded, 62)


class Odd(LlamaForCausalLM):
    """A family that is not known: it doubles its logits."""

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        out = super().forward(*inputs, **settings)
        out.logits = 2 * out.logits
        return out


class Short(Odd):
    """One that leaves out its last rows."""

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        out = super().forward(*inputs, **settings)
        out.logits = out.logits[..., :50]
        return out


def test_a_head_that_does_more_is_refused_by_name() -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    torch.manual_seed(0)
    odd = Odd(config).eval()
    with pytest.raises(ValueError, match=r"Odd does more to its logits than a head, the scales logit_scale,.*soft caps"):
        DistillDraft(tiny(), odd)
    with torch.no_grad():
        odd.get_output_embeddings().weight.mul_(1e-4)  # however small its logits are
    with pytest.raises(ValueError, match="Odd does more"):
        DistillDraft(odd, tiny())
    with pytest.raises(ValueError, match="Short gives 50 logits, its head 61"):
        DistillDraft(Short(config).eval(), tiny())
    granite = model("granite")
    granite.config.logits_scaling = 7.0
    head = Head(granite)
    granite.config.logits_scaling = 3.0
    with pytest.raises(ValueError, match="GraniteForCausalLM does more"):
        check_head(granite, head)


def test_a_head_of_another_kind_cannot_be_narrowed() -> None:
    head = Head(tiny())

    class Other(nn.Linear):
        pass

    head.linear = Other(32, 61)
    with pytest.raises(ValueError, match=r"the head is a Other.*train.support: all"):
        head.over(torch.tensor([1]))


V, H = 4000, 16


def wide(n: int, chunk: int, weights: dict[str, float], learned: bool) -> Live:
    """The loss of n positions and its backward, watched."""
    torch.manual_seed(0)
    draft, target = nn.Linear(H, V, bias=False).requires_grad_(learned), nn.Linear(H, V, bias=False).requires_grad_(False)
    hidden, signal = torch.randn(n, H, requires_grad=True), Dense(torch.randn(n, H), target)
    said = torch.randint(V, (n,))
    given = [draft.weight] if learned else []
    with Live(draft.weight, target.weight, hidden, signal.hidden, said) as live:
        total = scored_loss(hidden, draft, signal, Asked(weights, chunk), given, said)
        after = live.now
        total.backward()
        judged(hidden, draft, signal, Asked(weights, chunk))
    assert after <= 4 * (n * H + (V * H if learned else 0)) + 64, "what is kept for the backward: slopes alone"
    return live


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_logits_of_a_whole_batch_and_none_that_outlive_their_chunk(name: str, learned: bool) -> None:
    """D21. Elements and bytes of tensors as they are made and die, not resident memory: the same on every machine."""
    few, many = (wide(n, 8, {name: 1.0}, learned) for n in (16, 128))
    assert many.largest <= max(8 * (V + 1), V * H if learned else 0)
    one = 4 * 8 * V  # bytes of a chunk of logits
    assert many.peak - few.peak <= 4 * 3 * (128 - 16) * H, "16 times the positions take hidden states' room only"
    assert few.peak <= (17 if name.startswith("jsd") else 12) * one + (4 * 4 * V * H if learned else 0)
    whole = wide(128, 128, {name: 1.0}, learned)
    assert whole.largest >= 128 * V, "the test can fail"
    assert whole.peak > 4 * many.peak


def test_the_sum_of_a_heads_gradients_is_not_made_in_low_precision() -> None:
    torch.manual_seed(0)
    head = nn.Linear(H, 50, bias=False).bfloat16()
    hidden, signal = torch.randn(512, H).bfloat16(), Dense(torch.randn(512, H).bfloat16(), nn.Linear(H, 50).bfloat16())
    found = torch.autograd.grad(scored_loss(hidden, head, signal, Asked({"forward_kl": 1.0}, 1), [head.weight]), head.weight)[0]
    exact = copy.deepcopy(head).float()
    ours = Dense(signal.hidden.float(), copy.deepcopy(signal.head).float())  # type: ignore[arg-type]
    wanted = torch.autograd.grad(
        scored_loss(hidden.float(), exact, ours, Asked({"forward_kl": 1.0}, 512), [exact.weight]), exact.weight
    )[0]
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.004


def gradient(temperature: float, name: str) -> tuple[float, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(64, H, requires_grad=True)
    head = nn.Linear(H, 200, bias=False).requires_grad_(False)
    signal = Dense(hidden.detach() + 0.2 * torch.randn(64, H), head)
    total = scored_loss(hidden, head, signal, Asked({name: 1.0}, 16, temperature))
    return float(total), torch.autograd.grad(total, hidden)[0]


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_with_the_square_of_the_temperature_gradients_keep_their_size(name: str) -> None:
    """D12: both laws at T and the sum times T^2. Without the factor they would shrink 16 times from T = 1 to 4."""
    sizes = [float(gradient(temperature, name)[1].norm()) for temperature in (1.0, 2.0, 3.0, 4.0)]
    assert max(sizes) < 1.6 * min(sizes), sizes


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_both_laws_are_taken_at_the_temperature(temperature: float) -> None:
    target = tiny()
    draft, batch = noisy(target, 0.3), collate(ROWS)
    logits, wanted = draft(input_ids=batch.ids).logits[batch.scored], target(input_ids=batch.ids).logits[batch.scored].detach()
    said = batch.ids.roll(-1, 1)[batch.scored]
    for name in NAMES:
        total = DistillDraft(draft, target, name, chunk=4, temperature=temperature).loss(batch).total
        assert alike(total, naive(name, logits, wanted, said, temperature), 1e-5), name
    assert float(DistillDraft(noisy(target, 0.0), target, temperature=temperature).loss(batch).total) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("ids", [None, torch.arange(1, 31, 2)])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
def test_a_weighted_sum_over_forbidden_ids_is_finite_and_so_are_its_slopes(temperature: float, ids: Tensor | None) -> None:
    """D16 and D17 in chunks: what is finite in a loss alone must be so behind the head, the temperature and the draft's own ids."""
    torch.manual_seed(0)
    mine = 31 if ids is None else len(ids)
    head = nn.Linear(H, mine)
    hidden = (5 * torch.randn(9, H)).requires_grad_()
    wanted = 10 * torch.randn(9, 31)
    with torch.no_grad():
        head.bias[[2, 5]] = wanted[:, 3] = -torch.inf
    wanted[4, torch.arange(31) != 7] = -torch.inf  # a target that knows one token only
    said, weights = columns(torch.arange(9), ids), {name: 0.5 + number for number, name in enumerate(NAMES)}

    def slopes(weights: dict[str, float]) -> tuple[Tensor, ...]:
        total = scored_loss(hidden, head, Dense(wanted, nn.Identity()), Asked(weights, 4, temperature, ids), (head.weight,), said)
        return (total.detach(), *torch.autograd.grad(total, [hidden, head.weight]))

    together, alone = slopes(weights), [slopes({name: weight}) for name, weight in weights.items()]
    for found, *parts in zip(together, *alone, strict=True):
        assert bool(torch.isfinite(found).all())
        assert alike(found, torch.stack(parts).sum(0), 1e-5)
    assert not bool(together[2][[2, 5]].any()), "no slope moves what a head cannot say"


def test_the_temperature_that_text_is_sampled_at_is_another_thing() -> None:
    target = tiny()
    draft, batch = noisy(target, 0.3), collate(ROWS)
    before = DistillDraft(draft, target).loss(batch)
    for one in (target, draft):
        one.generation_config.temperature, one.generation_config.do_sample, one.generation_config.top_k = 0.2, True, 3
    after = DistillDraft(draft, target).loss(batch)
    assert torch.equal(before.total, after.total)
    assert torch.equal(before.metrics["acceptance"], after.metrics["acceptance"])


def test_the_datas_own_tokens_are_found_among_the_ids_that_a_head_is_over() -> None:
    tokens = torch.tensor([4, 0, 61, 7, 9])
    assert columns(tokens, None) is tokens
    assert columns(tokens, torch.tensor([0, 4, 9])).tolist() == [1, 0, 3, 3, 2]
    target = tiny()
    batch = collate(ROWS)
    cut = CutDraft(target, [0, 1])
    with pytest.raises(ValueError, match="ce_data is a loss of the data's own tokens"):
        scored_loss(torch.zeros(1, 32), cut.head, Dense(torch.zeros(1, 32), cut.head), Asked({"ce_data": 1.0}))
    support = torch.tensor([2, 4, 8, 22, 24])  # all that is said, but 23
    logits = cut.head(cut(*cut.inputs(batch))).detach()[:, support]
    said = batch.ids.roll(-1, 1)[batch.scored].tolist()
    wanted = sum(
        30.0 if token == 23 else -float(row.log_softmax(-1)[support.tolist().index(token)])
        for token, row in zip(said, logits, strict=True)
    )
    assert 23 in said
    found = DistillDraft(cut, target, "ce_data", support=support).loss(batch)
    assert float(found.total) == pytest.approx(wanted, rel=1e-5)
    assert bool(torch.isfinite(torch.autograd.grad(found.total, cut.map.weight)[0]).all())


def test_a_draft_of_few_ids_learns_from_each_loss() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([0, 3, 4, 9, 10, 22, 30])
    head, signal = nn.Linear(H, 7, bias=False).requires_grad_(False), Dense(3 * torch.randn(6, 31), nn.Identity())
    said = columns(torch.tensor([3, 5, 9, 30, 1, 0]), ids)
    for name in NAMES:
        hidden = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        total = scored_loss(hidden, head, signal, Asked({name: 1.0}, 2, 1.0, ids), (), said)
        (found,) = torch.autograd.grad(total, hidden)
        assert bool(torch.isfinite(total)), name
        assert bool(torch.isfinite(found).all()), name
        assert float(found.abs().max()) > 0, name
    law = torch.tensor([[0.3, 0.2, *[0.5 / 29] * 29]]).log()  # the other ids together are likelier than the likeliest
    sure = scored_loss(
        hidden[:1], head, Dense(law, nn.Identity()), Asked({"ce_argmax": 1.0}, 2, 1.0, torch.tensor([0, 1, 2, 3, 4, 5, 6]))
    )
    assert float(sure) == pytest.approx(-float(head(hidden[0]).log_softmax(-1)[0]), rel=1e-5)


def test_nothing_is_kept_where_no_gradient_is_asked_and_no_position_is_no_trouble() -> None:
    target = tiny()
    objective = DistillDraft(noisy(target, 0.3), target)
    batch = collate(ROWS)
    with torch.no_grad():
        assert objective.loss(batch).total.grad_fn is None
    none = Batch(batch.ids, batch.real, torch.zeros_like(batch.scored))
    loss = objective.loss(none).total
    loss.backward()
    assert float(loss) == 0
    assert all(one.grad is None or float(one.grad.abs().max()) == 0 for one in objective.trainable.parameters())


def test_every_family_of_the_tests_has_a_head_that_is_known() -> None:
    for family in FAMILIES:
        target = tiny(family)
        check_head(target, Head(target))
