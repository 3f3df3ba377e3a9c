"""An exit and its target in one cache: the text, its acceptance and every logit are those of two caches, and no layer runs twice."""

from __future__ import annotations

import copy
import functools
import random
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from draftsmith.specdec import CombinedDrafter, EarlyExitDrafter, NgramDrafter, Outcome, Sampling, generate
from draftsmith.specdec.cache import CachedLM, records_past
from draftsmith.specdec.drafters.early_exit import exit_view
from draftsmith.specdec.pace import Round
from draftsmith.specdec.split import SplitLM
from tiny import FAMILIES, plain_greedy, sharp, tiny

PROMPTS = [[5, 9, 11, 4, 8], [7], [3, 3, 20, 21, 22, 23, 24, 25, 3, 3]]
TARGET = tiny("llama")


def gemma3(window: int) -> Any:
    """Windows below, one whole view in the middle of the upper half."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return sharp(Gemma3TextConfig(vocab_size=61, num_hidden_layers=4, sliding_window=window, layer_types=kinds, **small))


MORE: dict[str, Callable[[], Any]] = {"gemma3": lambda: gemma3(512)}


def agrees(target: Any, drafter: Any, alone: Any, prompts: list[list[int]] = PROMPTS, **settings: Any) -> Any:
    """The run that shares, after a comparison with the same run of two caches."""
    out, wanted = generate(target, prompts, drafter, **settings), generate(target, prompts, alone, **settings)
    assert drafter.notes() == [], "it was to share"
    assert (out.tokens, out.rounds, out.ends) == (wanted.tokens, wanted.rounds, wanted.ends)
    return out


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_every_family_is_split_and_says_what_it_said(family: str) -> None:
    target = MORE[family]() if family in MORE else tiny(family)
    layers = target.config.num_hidden_layers
    for layer in (layers - 1 if family in MORE else 1, layers):
        drafter, alone = pair("exit", target, layer)
        out = agrees(target, drafter, alone, PROMPTS[:2], k=3, max_new_tokens=8)
    assert out.tokens == [plain_greedy(target, prompt, 8) for prompt in PROMPTS[:2]]
    assert all(drafted == accepted for rounds in out.rounds for drafted, accepted in rounds), "the last exit is the target"


class Changing:
    """Drafts 2, 0, 4, 1, 0, 3 ... tokens, and after `rounds` rounds none."""

    sure = False

    def __init__(self, rounds: int = 99) -> None:
        self.rounds = rounds

    def begin(self, prefill_seconds: float, tokens: int) -> None:
        self.at = -1

    def next(self, evidence: list[int]) -> int:
        self.at += 1
        return (2, 0, 4, 1, 0, 3)[self.at % 6] if self.at < self.rounds else 0

    def observe(self, round: Round) -> None: ...


def pair(kind: str, target: Any = TARGET, layer: int = 2) -> tuple[Any, Any]:
    """The same drafter twice: sharing, and with a cache of its own."""
    exits = [EarlyExitDrafter(target, layer, shared=shared) for shared in (True, False)]
    if kind == "exit":
        return exits[0], exits[1]
    one, other = (CombinedDrafter(NgramDrafter(least=0.0), drafter, min_match=2) for drafter in exits)
    return one, other


@pytest.mark.parametrize("kind", ["exit", "combined"])
@pytest.mark.parametrize("how", [Sampling(), Sampling(1.0), Sampling(0.7, top_k=20)])
def test_whatever_is_drafted_refused_and_left_out_the_two_ways_agree(kind: str, how: Sampling) -> None:
    """Ragged rows that leave at different times, k from 0 to 4, a lookup in between, one seed a row."""
    drafter, alone = pair(kind)
    ends = {generate(TARGET, PROMPTS, max_new_tokens=9).tokens[0][6], 60}
    settings: dict[str, Any] = {"how": how, "pace": Changing(), "eos": ends, "max_new_tokens": 20}
    out = agrees(TARGET, drafter, alone, seed=[3, 4, 5], **settings)
    assert how.temperature or out.tokens == [plain_greedy(TARGET, prompt, 20, frozenset(ends)) for prompt in PROMPTS]
    if how.temperature:
        agrees(TARGET, drafter, alone, seed=6, verify="block", processors=[RepetitionPenaltyLogitsProcessor(1.3)], **settings)


@pytest.mark.parametrize("view", ["exit", "block"])
def test_reading_ahead_and_taking_it_up_gives_the_whole_models_logits(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rows read any tokens ahead; the target is then asked for all, some or none of them, and others behind."""
    chance, exit_ = random.Random(view), exit_view(TARGET, 2)
    if view == "block":  # a head with a layer of its own above the cut
        exit_.model.layers = nn.ModuleList([TARGET.model.layers[0], copy.deepcopy(TARGET.model.layers[1])])
    parts, whole, rows = SplitLM(TARGET, exit_, 2 if view == "exit" else 1, 3), CachedLM(TARGET, 3), 3
    taken = 0
    for turn in range(14):
        width = chance.randint(1, 4)
        asked = torch.tensor([[chance.randrange(61) for _ in range(width)] for _ in range(rows)])
        exists = torch.arange(width) < torch.tensor([chance.randint(0, width) for _ in range(rows)])[:, None]
        exists[chance.randrange(rows)] = True
        steps = chance.choice([0, 1, width, width + 2])
        ahead = torch.tensor([[chance.randrange(61) for _ in range(steps)] for _ in range(rows)]).reshape(rows, steps)
        begins = [chance.choice([0, 0, 0, 1, steps]) for _ in range(rows)]
        for b, begin in enumerate(begins):
            agree = max(0, min(steps - begin, width, chance.choice([0, 1, 9])))
            ahead[b, begin : begin + agree] = asked[b, :agree]
        for step in range(steps):
            there = torch.tensor([[begin <= step] for begin in begins])
            parts.draft(ahead[:, step : step + 1], None if max(begins) == 0 else there, keep=1)
        fed = feeding(parts.lower, monkeypatch)
        found, _ = parts.extend(asked, None if bool(exists.all()) else exists)
        wanted, _ = whole.extend(asked, exists)
        assert torch.allclose(found[exists], wanted[exists], atol=2e-4)
        assert parts.lengths.tolist() == parts.lower.lengths.tolist() == whole.lengths.tolist()
        taken += int(exists.sum()) - sum(fed)
        n = [chance.randint(0, min(2, length)) for length in whole.lengths.tolist()]
        parts.forget(n)
        whole.forget(n)
        if turn == 8:
            parts.select(torch.tensor([0, 2]))
            whole.select(torch.tensor([0, 2]))
            rows = 2
    assert taken > 10, "what was read ahead is to be taken up"


def feeding(lm: CachedLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of `lm` from now on reads."""
    fed: list[int] = []
    extend = type(lm).extend

    def counted(ids: Tensor, valid: Tensor | None, *more: Any, **named: Any) -> Any:
        fed.append(ids.numel() if valid is None else int(valid.sum()))
        return extend(lm, ids, valid, *more, **named)

    monkeypatch.setattr(lm, "extend", counted)
    return fed


@pytest.mark.parametrize("kind", ["exit", "combined"])
@pytest.mark.parametrize("layer", [1, 3])
def test_each_layer_sees_each_position_once_a_round(kind: str, layer: int) -> None:
    """As many positions as the target was asked for, and none twice: drafting adds nothing to any layer."""
    seen: dict[int, list[int]] = defaultdict(list)

    def look(number: int) -> Callable[..., None]:
        return lambda _module, _inputs, named: seen[number].extend(named["position_ids"][0].tolist())

    handles = [one.register_forward_pre_hook(look(i), with_kwargs=True) for i, one in enumerate(TARGET.model.layers)]
    heads: list[int] = []
    handles.append(TARGET.lm_head.register_forward_hook(lambda _module, _inputs, out: heads.append(out.shape[1])))
    drafter, _ = pair(kind, layer=layer)
    generate(TARGET, [PROMPTS[2]], drafter, k=3, max_new_tokens=1)  # the trial of the halves counts too, but once
    seen.clear()
    heads.clear()
    out = generate(TARGET, [PROMPTS[2]], drafter, pace=Changing(), max_new_tokens=30)
    for handle in handles:
        handle.remove()
    at = len(PROMPTS[2])
    wanted = list(range(at))
    for drafted, accepted in out.rounds[0][1:]:
        wanted += range(at, at + drafted + 1)
        at += accepted + 1
    assert any(drafted > accepted for drafted, accepted in out.rounds[0]) == (layer == 1), (
        "some of what was drafted is to be refused"
    )
    assert dict(seen) == dict.fromkeys(range(3), wanted)
    drafted = sum(drafted for drafted, _ in out.rounds[0])
    assert kind == "combined" or sum(heads) == len(out.rounds[0]) + 2 * drafted, "the head: for each draft, and for what is judged"


def watched(drafter: Any) -> list[Any]:
    """What the decoder is given to read with, as it is given."""
    given, share = [], drafter.share

    def shared(lm: Any) -> Any:
        given.append(share(lm))
        return given[-1]

    drafter.share = shared
    return given


@pytest.mark.parametrize("kind", ["exit", "combined"])
def test_rows_of_a_batch_are_read_once_by_each_half(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _ = pair(kind)
    fed: dict[str, list[int]] = {}
    share = drafter.share

    def shared(lm: Any) -> Any:
        split = share(lm)
        fed.update({half: feeding(getattr(split, half), monkeypatch) for half in ("lower", "upper")})
        return split

    drafter.share = shared
    out = generate(TARGET, PROMPTS, drafter, pace=Changing(6), max_new_tokens=36)  # no row runs out of room while drafting
    wanted = sum(map(len, PROMPTS)) + sum(drafted + 1 for rounds in out.rounds for drafted, _ in rounds[1:])
    assert [sum(fed[half]) for half in ("lower", "upper")] == [wanted, wanted]
    assert any(drafted > accepted for rounds in out.rounds for drafted, accepted in rounds)


def test_the_cache_holds_one_copy_and_goes_with_the_call() -> None:
    drafter = EarlyExitDrafter(TARGET, 2)
    given = watched(drafter)
    held: list[int] = []

    def look(written: Any) -> None:
        caches = [half._cache for half in (given[0].lower, given[0].upper)]
        held.append(sum(layer.keys.numel() for cache in caches for layer in cache.layers if layer.is_initialized))

    out = generate(TARGET, [PROMPTS[0]], drafter, k=3, max_new_tokens=12, on_tokens=look)
    tokens = len(PROMPTS[0]) + len(out.tokens[0]) - 1  # all but the last
    config = TARGET.config
    assert held[-1] == tokens * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size // 4
    gone = weakref.ref(given.pop())
    assert gone() is None, "a drafter must not keep the target's cache"


def anatomy(model: Any) -> tuple[Any, ...]:
    modules = [(name, id(one), sorted(vars(one)), one.training, len(one._forward_hooks)) for name, one in model.named_modules()]
    return modules, model.config.to_dict()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_fault_in_any_half_leaves_the_model_and_later_calls_whole(layer: int) -> None:
    drafter, before = EarlyExitDrafter(TARGET, 2), anatomy(TARGET)
    wanted = plain_greedy(TARGET, PROMPTS[0], 12)

    def run(one: EarlyExitDrafter) -> list[int]:
        return generate(TARGET, [PROMPTS[0]], one, k=3, max_new_tokens=12).tokens[0]

    def broken(one: EarlyExitDrafter, call: int) -> list[int]:
        """A run in which the layer fails when it is called for the `call`th time."""
        left = iter([*[False] * (call - 1), True])

        def fail(_module: Any, _inputs: Any) -> None:
            if next(left, False):
                raise RuntimeError("broken")

        handle = TARGET.model.layers[layer].register_forward_pre_hook(fail)
        try:
            return run(one)
        finally:
            handle.remove()

    assert run(drafter) == wanted
    for call in (1, 2, 3, 4):  # in the prefill, in drafting (the lower layers), in verification
        with pytest.raises(RuntimeError, match="broken"):
            broken(drafter, call)
        assert anatomy(TARGET) == before
        assert run(drafter) == wanted
    fresh = EarlyExitDrafter(TARGET, 2)
    assert broken(fresh, 2) == wanted, "a trial that fails is no fault: the exit keeps a cache of its own"
    assert "do not run: RuntimeError: broken" in fresh.notes()[0]
    assert anatomy(TARGET) == before


def test_a_drafter_that_shared_drafts_alone_when_it_is_begun_alone() -> None:
    drafter, alone = EarlyExitDrafter(TARGET, 2), EarlyExitDrafter(TARGET, 2, shared=False)
    generate(TARGET, PROMPTS, drafter, k=3, max_new_tokens=6)
    lm = CachedLM(TARGET, 1)
    left = drafter.share(lm)  # a call that ended before it had read its prompt
    assert isinstance(left, SplitLM)
    ids = torch.tensor([PROMPTS[0]])
    for one in (drafter, alone):
        one.begin(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([7]))
    assert drafter.propose(4, Sampling()).tokens.tolist() == alone.propose(4, Sampling()).tokens.tolist()
    for one in (drafter, alone):
        one.observe(Outcome(torch.tensor([1]), torch.tensor([9])))
    assert drafter.propose(2, Sampling()).tokens.tolist() == alone.propose(2, Sampling()).tokens.tolist()


@pytest.mark.parametrize("window", [4, 8])
def test_sliding_windows_are_shared_where_they_can_be_rolled_back(window: int) -> None:
    for target in (tiny("mistral", sliding_window=window), gemma3(window)):
        drafter, alone = pair("combined", target)
        if records_past():
            agrees(target, drafter, alone, [PROMPTS[2]], pace=Changing(), max_new_tokens=24)
            assert generate(target, [PROMPTS[2]], drafter, k=3, max_new_tokens=24).tokens == [plain_greedy(target, PROMPTS[2], 24)]
        else:
            with pytest.raises(ValueError, match="are used"):
                generate(target, [PROMPTS[2]], drafter, k=3, max_new_tokens=24)


def test_a_batch_in_a_window_gets_no_more_columns_than_the_target_alone() -> None:
    """Rows that drafted and rows that did not would leave holes in the lower half, which a window counts."""
    target = tiny("mistral", sliding_window=64)
    drafter, alone = pair("combined", target)
    given, most = watched(drafter.drafter), [0, 0]

    def look(written: Any) -> None:
        for half, lm in enumerate((given[-1].lower, given[-1].upper)):
            most[half] = max(most[half], lm.columns)

    agrees(target, drafter, alone, pace=Changing(), max_new_tokens=18, on_tokens=look)
    assert most[0] <= most[1]


class Scaled(LlamaForCausalLM):
    """Its logits hang on how many layers there are, and with three of them it does not run: no half of it is a model."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *inputs: Any, **named: Any) -> Any:
        if len(self.model.layers) == 3:
            raise RuntimeError("three layers")
        out = super().forward(*inputs, **named)
        out.logits = out.logits * len(self.model.layers)
        return out


def test_what_cannot_share_keeps_its_own_cache_and_says_so() -> None:
    def check(target: Any, drafter: EarlyExitDrafter, why: str) -> None:
        out = generate(target, [PROMPTS[0]], drafter, k=3, max_new_tokens=10)
        assert out.tokens == [plain_greedy(target, PROMPTS[0], 10)]
        assert why in "".join(out.warnings)
        assert f"exit after layer {drafter.layer} keeps a cache of its own" in out.warnings[0]

    scaled = tiny("llama", num_hidden_layers=4)
    scaled.__class__ = Scaled
    check(scaled, EarlyExitDrafter(scaled, 4), "give other logits than the whole")
    check(scaled, EarlyExitDrafter(scaled, 2), "do not run: RuntimeError: three layers")
    check(tiny("llama"), EarlyExitDrafter(TARGET, 2), "made from another model")
    drafter = EarlyExitDrafter(TARGET, 2)
    drafter.model.model.layers[1] = copy.deepcopy(TARGET.model.layers[1])  # as adapters in the exit's layers would have it
    check(TARGET, drafter, "first 2 layers are not the target's own")
    later = tiny("llama")
    drafter = EarlyExitDrafter(later, 2)
    later.forward = later.forward
    check(later, drafter, "wrapped forward")
    del later.forward
    assert generate(later, [PROMPTS[0]], drafter, max_new_tokens=4).warnings == []
    with pytest.raises(ValueError, match=r"layers \[1\] asked"):
        SplitLM(TARGET, exit_view(TARGET, 2), 2, 1).extend(torch.tensor([[1]]), None, (1,))


def test_an_exit_may_have_a_norm_and_a_head_of_its_own() -> None:
    """They speak for the draft alone: the target's own still judge."""
    head = copy.deepcopy(TARGET.lm_head)
    torch.nn.init.zeros_(head.weight)
    drafter = EarlyExitDrafter(TARGET, 2, head)
    out = agrees(TARGET, drafter, EarlyExitDrafter(TARGET, 2, head, shared=False), k=3, max_new_tokens=10)
    assert out.tokens == [plain_greedy(TARGET, prompt, 10) for prompt in PROMPTS]
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        bare = exit_view(TARGET, 2, norm=nn.Identity())(input_ids=ids).logits
        stream = TARGET(input_ids=ids, output_hidden_states=True).hidden_states[2]
    assert torch.allclose(bare, TARGET.lm_head(stream), atol=1e-4)
