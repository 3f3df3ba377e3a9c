"""Fewer numbers a token: the residual stream in the basis of its principal components, exact while none of them is dropped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.making.cut import build, untied
from draftsmith.distill.making.observe import observe
from draftsmith.specdec.models import blocks

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.gate", "mlp.experts.gate_up_proj"),
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj", "mlp.experts.down_proj")


@torch.no_grad()
def rotated(target: PreTrainedModel, batches: Iterable[Batch], hidden: int) -> PreTrainedModel:
    """`target` with hidden size `hidden`: the leading principal components of what its norms read (SliceGPT, 2401.15024).

    RMSNorm commutes with a rotation once its weight is folded into the layers that read it, so one rotation Q of all hidden
    states goes into the embedding, into what reads the stream and what writes it. A norm over fewer numbers divides by
    another mean: its readers are multiplied by sqrt(H / hidden). The head becomes its own.
    """
    text: Any = target.config.get_text_config()
    width = text.hidden_size
    if not 0 < hidden <= width:
        raise ValueError(f"hidden size {hidden} asked; {type(target).__name__} has {width}")
    body: Any = getattr(target, target.base_model_prefix)
    _check(target, body)
    basis = principal(target, batches, body)[:, :hidden]
    scale = (width / hidden) ** 0.5
    config = untied(target.config)
    mine = config.get_text_config()
    mine.head_dim = getattr(text, "head_dim", None) or width // text.num_attention_heads
    mine.hidden_size = hidden
    try:
        config.validate()
        draft = build(config, target)
    except Exception as error:
        raise ValueError(f"{type(target).__name__} can't have a hidden size of {hidden}: {error}") from error

    def reads(weight: Tensor, norm: Tensor) -> Tensor:  # the last dimension is the stream's
        return (scale * (weight.double() * norm.double()) @ basis).to(weight.dtype)

    def writes(weight: Tensor) -> Tensor:  # the one before the last is, or the only one of a bias
        return (basis.T @ weight.double()).to(weight.dtype)

    state, base = dict(target.state_dict()), target.base_model_prefix
    embedding, head = f"{base}.embed_tokens.weight", "lm_head.weight"
    state[head] = reads(state[head], state[f"{base}.norm.weight"])
    state[embedding] = (state[embedding].double() @ basis).to(state[embedding].dtype)
    state[f"{base}.norm.weight"] = torch.ones_like(state[f"{base}.norm.weight"][:hidden])
    for number in range(len(blocks(target)[1])):
        layer = f"{base}.{blocks(target)[0]}.{number}"
        for norm, readers in READERS.items():
            weight = state[f"{layer}.{norm}.weight"]
            for name in _weights(state, layer, readers):
                state[name] = reads(state[name], weight)
            state[f"{layer}.{norm}.weight"] = torch.ones_like(weight[:hidden])
        for name in _weights(state, layer, WRITERS) + [f"{layer}.{one}.bias" for one in WRITERS]:
            if name in state:
                state[name] = writes(state[name])
    draft.load_state_dict(state, strict=True)
    return draft


def principal(target: PreTrainedModel, batches: Iterable[Batch], body: Any) -> Tensor:
    """The eigenvectors, by falling variance, of what all norms of the stream make of it, before their weights: [H, H], float64."""
    width = target.config.get_text_config().hidden_size
    total = torch.zeros(width, width, dtype=torch.float64, device=target.device)

    def see(read: Tensor, wrote: Tensor) -> None:
        # Normed, for the raw stream of a few tokens (the first of a text, mostly) is hundreds of times larger than all others.
        unit = nn.functional.normalize(read.double(), dim=-1)
        total.add_(unit.T @ unit)

    norms = [getattr(layer, name) for layer in blocks(target)[1] for name in READERS] + [body.norm]
    observe(target, batches, [(norm, see) for norm in norms])
    return torch.linalg.eigh(total).eigenvectors.flip(-1)


def _check(target: PreTrainedModel, body: Any) -> None:
    """ValueError for a model whose norms do not commute with a rotation, or whose stream is read where we do not look."""
    name = type(target).__name__
    layer = blocks(target)[1][0]
    streams = {one for one, module in layer.named_children() if "norm" in one}
    final: Any = getattr(body, "norm", None)
    if streams != set(READERS) or final is None:
        raise ValueError(
            f"{name} has the norms {sorted(streams)} in a layer; only input_layernorm and post_attention_layernorm, before what they feed, "
            "let the hidden size be rotated. Leave hidden out"
        )
    known = {*WRITERS, *READERS, "self_attn.q_norm", "self_attn.k_norm", *(one for readers in READERS.values() for one in readers)}
    for number, each in enumerate(blocks(target)[1]):
        strange = [one for one, _ in each.named_parameters() if not {one, one.rpartition(".")[0]} & known]
        if strange:
            raise ValueError(f"{name} has {strange[0]} in layer {number}, which no rotation here reaches; leave hidden out")
    probe = torch.linspace(-1, 1, final.weight.numel(), dtype=final.weight.dtype, device=final.weight.device)
    wanted = probe * final.weight / (probe.float().pow(2).mean().sqrt()).to(probe.dtype)
    embedding: Any = target.get_input_embeddings()
    ids = torch.tensor([1], device=embedding.weight.device)
    if not torch.allclose(final(probe), wanted, atol=1e-3, rtol=1e-2) or not torch.equal(embedding(ids)[0], embedding.weight[1]):
        raise ValueError(f"{name} norms or embeds otherwise than by weight * x / rms(x) and a plain table; leave hidden out")


def _weights(state: dict[str, Tensor], layer: str, parts: tuple[str, ...]) -> list[str]:
    """The weights of these parts of a layer that are there: a linear layer's, or the parameter itself (experts are kept as one)."""
    return [name for part in parts for name in (f"{layer}.{part}.weight", f"{layer}.{part}") if name in state]
