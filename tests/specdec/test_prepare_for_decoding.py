"""A prepared model says what the unprepared one says, whatever is done to it between calls, and can be put back."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from draftsmith.specdec import EarlyExitDrafter, NgramDrafter, generate, kernels
from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.early_exit import exit_view
from draftsmith.specdec.prepare import FEW, FewRowsNorm, prepare_for_decoding, prepared, report, restore
from tiny import FAMILIES, VOCABULARY, plain_greedy, tiny

COMPILER = [True, False]  # where there is no compiler both run the second way
PROMPTS = [[5, 9, 5, 9, 5, 9, 7], [11, 3, 8]]


def logits(model: nn.Module, n: int = 5, batch: int = 1) -> Tensor:
    ids = torch.arange(n * batch).view(batch, n) * 7 % VOCABULARY
    with torch.inference_mode():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("compiler", COMPILER)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits_and_back_bit_for_bit(family: str, compiler: bool) -> None:
    model = tiny(family)
    norms = sum(
        type(module).__name__.endswith("RMSNorm") for module in model.modules() if not family.startswith("gemma")
    )  # 1 + weight
    wanted = {(n, batch): logits(model, n, batch) for n in (1, 2, 3, 5, 6, 13, 16, FEW + 1) for batch in (1, 3)}
    assert prepare_for_decoding(model, compiler) is model
    for (n, batch), one in wanted.items():
        assert (logits(model, n, batch) - one).abs().max() <= 1e-4 * one.abs().max()
    done = report(model)
    assert done is not None
    assert done.linears == sum(isinstance(module, nn.Linear) for module in model.modules())
    built = compiler and kernels.kernels().library
    assert done.norms == (norms if built else 0)
    assert bool(done.why_not) != bool(built)
    restore(model)
    assert report(model) is None
    assert all(torch.equal(logits(model, n, batch), one) for (n, batch), one in wanted.items())
    assert {type(module) for module in model.modules()} == {type(module) for module in tiny(family).modules()}


@pytest.mark.parametrize("compiler", COMPILER)
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_is_plain_decoding_on_a_prepared_model(family: str, compiler: bool) -> None:
    model = prepare_for_decoding(tiny(family), compiler)
    for prompt in PROMPTS:
        plain = generate(model, [prompt], max_new_tokens=24)
        assert generate(model, [prompt], NgramDrafter(), k=4, max_new_tokens=24).tokens == plain.tokens
    plain = generate(model, PROMPTS, max_new_tokens=24)
    assert generate(model, PROMPTS, NgramDrafter(), k=4, max_new_tokens=24).tokens == plain.tokens


def test_a_row_is_the_same_to_the_last_bit_whatever_stands_beside_it() -> None:
    model = prepare_for_decoding(tiny())
    if report(model).why_not:  # then BLAS decides, and promises nothing
        return
    for linear in (nn.Linear(77, 35), nn.Linear(64, 7, bias=False)):
        holder = nn.ModuleList([linear])
        prepare_for_decoding(holder)  # type: ignore[arg-type]
        x = torch.randn(1, FEW, linear.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            alone = torch.cat([holder[0](x[:, i : i + 1]) for i in range(FEW)], dim=1)
            for n in range(1, FEW + 1):
                assert torch.equal(holder[0](x[:, :n]), alone[:, :n])


@pytest.mark.parametrize("compiler", COMPILER)
def test_changed_weights_are_seen_at_the_next_call(compiler: bool) -> None:
    model, other = prepare_for_decoding(tiny(), compiler), tiny()
    logits(model)
    for change in (
        lambda weight: weight.data.mul_(1.5),  # bumps no version counter
        lambda weight: setattr(weight, "data", weight.data + 0.01),
        lambda weight: weight.data.copy_(weight.data.flip(0)),
    ):
        for one in (model, other):
            change(one.model.layers[1].mlp.up_proj.weight)
            change(one.model.norm.weight)
        assert torch.allclose(logits(model), logits(other), atol=1e-4)
    model.load_state_dict(tiny(seed=3).state_dict())
    assert torch.allclose(logits(model), logits(tiny(seed=3)), atol=1e-4)


def test_training_is_the_modules_own() -> None:
    model, other = prepare_for_decoding(tiny()), tiny()
    ids = torch.arange(6)[None]
    for _ in range(2):
        for one in (model, other):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            one(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.allclose(logits(model), logits(other), atol=1e-4)


def test_saved_weights_are_the_originals(tmp_path: Path) -> None:
    model, other = prepare_for_decoding(tiny(tie_word_embeddings=True)), tiny(tie_word_embeddings=True)
    assert model.state_dict().keys() == other.state_dict().keys()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(other))


def test_twice_is_once_and_inside_a_with() -> None:
    model = prepare_for_decoding(tiny())
    first = report(model)
    assert report(prepare_for_decoding(model)) == first
    with prepared(model):
        pass
    assert report(model) == first
    restore(model)
    with prepared(model) as inside:
        assert inside is model
        assert report(model) == first
    assert report(model) is None
    assert report(prepare_for_decoding(prepare_for_decoding(model, compiler=False))).linears == first.linears


def test_copies_and_early_exits_keep_working() -> None:
    model, other = prepare_for_decoding(tiny()), tiny()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.allclose(logits(twin), logits(other), atol=1e-4)
    assert torch.allclose(logits(exit_view(twin, 2)), logits(exit_view(other, 2)), atol=1e-4)
    drafter = EarlyExitDrafter(twin, 2)
    out = generate(twin, [PROMPTS[0]], drafter, k=3, max_new_tokens=12)
    assert (out.tokens, drafter.notes()) == ([plain_greedy(other, PROMPTS[0], 12)], []), "a prepared target shares its cache"
    restore(twin)
    assert torch.equal(logits(twin), logits(other))


def test_what_the_kernels_do_not_serve_is_the_modules_own() -> None:
    model = prepare_for_decoding(tiny())
    linear, norm = model.model.layers[0].mlp.up_proj, model.model.norm
    strided = torch.randn(4, 64)[:, ::2]
    with torch.no_grad():
        assert torch.allclose(linear(strided), F.linear(strided, linear.weight), atol=1e-5)
        assert linear(torch.empty(0, 32)).shape == (0, 48)
        assert linear(torch.randn(32)).shape == (48,)
        with pytest.raises(RuntimeError):
            linear(torch.randn(2, 16))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(torch.randn(2, 32)).dtype == torch.bfloat16
        linear.weight.data = linear.weight.data.t().contiguous().t()
        assert torch.allclose(linear(strided), F.linear(strided, linear.weight.contiguous()), atol=1e-5)
        model.to(torch.bfloat16)
        assert linear(torch.randn(2, 32).bfloat16()).dtype == torch.bfloat16
        assert norm(torch.randn(2, 32).bfloat16()).dtype == torch.bfloat16


def test_a_model_it_cannot_help_says_so() -> None:
    model = prepare_for_decoding(tiny().to(torch.bfloat16))
    assert report(model).linears == 0
    assert "this model is torch.bfloat16 on cpu" in report(model).why_not
    assert not any(isinstance(module, FewRowsNorm) for module in model.modules())


def test_a_module_that_someone_wrapped_is_left_alone() -> None:
    model = tiny()
    head = model.lm_head
    head.forward = lambda x, old=head.forward: old(x) * 0
    prepare_for_decoding(model)
    assert type(head) is nn.Linear
    assert not logits(model).any()


@pytest.mark.parametrize(
    "compiler, words",
    [("false", "cannot build"), ("no-such-compiler", "cannot build"), (None, "no C compiler")],
)
def test_a_compiler_that_fails_is_named(compiler: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere") if compiler is None else monkeypatch.setenv("CC", compiler)
    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
    found = kernels.kernels.__wrapped__()
    assert found.library is None
    assert words in found.why_not


def test_kernels_that_compute_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.kernels().library is None:
        return
    monkeypatch.setattr(kernels, "SOURCE", kernels.SOURCE.replace("s + b[r] : s;", "s : s;"))
    assert "compute wrongly" in kernels.kernels.__wrapped__().why_not


def test_verification_gives_the_logits_of_single_steps() -> None:
    model = prepare_for_decoding(tiny())
    ids = torch.tensor([PROMPTS[0]])
    together, apart = CachedLM(model, 1), CachedLM(model, 1)
    one, _ = together.extend(ids, torch.ones_like(ids, dtype=torch.bool))
    steps = [apart.extend(ids[:, i : i + 1], torch.ones(1, 1, dtype=torch.bool))[0] for i in range(ids.shape[1])]
    assert torch.allclose(one, torch.cat(steps, dim=1), atol=1e-4)
