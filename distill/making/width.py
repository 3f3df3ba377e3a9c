"""A narrower model of the same class: what writes least into the residual stream on calibration text goes, what is left is unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.making.cut import build
from draftsmith.distill.making.observe import observe
from draftsmith.distill.making.rotate import rotated
from draftsmith.specdec.models import blocks


class Shape(NamedTuple):
    """The widths of a model: MLP channels, heads (all that ask, and the groups that share keys and values), size of a head."""

    channels: int
    heads: int
    groups: int
    head_dim: int


class Kept(NamedTuple):
    """Of one layer: the channels and the groups of heads that stay, ascending."""

    channels: Tensor
    groups: Tensor


def narrow(
    target: PreTrainedModel, batches: Iterable[Batch], hidden: int | None = None, intermediate: int | None = None, heads: int | None = None
) -> PreTrainedModel:  # fmt: skip
    """`target` with `intermediate` MLP channels and `heads` attention heads a layer (whole groups), and `hidden` numbers a token.

    Channels and groups are ranked layer by layer by the mean norm of what each writes into the residual stream over the
    real tokens of `batches`: |activation| times the norm of its column of the projection, which no rescaling between the two
    can change. `hidden` is a rotation first (see `rotated`). At full size nothing changes.
    """
    batches = list(batches)
    model = target if hidden is None else rotated(target, batches, hidden)
    full = _shape(model)
    wanted = full._replace(
        channels=full.channels if intermediate is None else intermediate, heads=full.heads if heads is None else heads
    )
    _check(model, full, wanted)
    wanted = wanted._replace(groups=wanted.heads * full.groups // full.heads)
    if wanted == full and hidden is not None:
        return model
    kept = [
        Kept(_most(channels, wanted.channels), _most(groups, wanted.groups))
        for channels, groups in activity(model, batches)
    ]  # fmt: skip
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    if wanted.channels < full.channels:
        text.intermediate_size = wanted.channels
    if wanted.heads < full.heads:
        text.num_attention_heads, text.num_key_value_heads = wanted.heads, wanted.groups
        text.head_dim = wanted.head_dim  # no longer the hidden size over the heads
    try:
        config.validate()
        draft = build(config, model)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} can't have {wanted}: {error}") from error
    state, prefix = dict(model.state_dict()), f"{model.base_model_prefix}.{blocks(model)[0]}."
    for key, value in state.items():
        if key.startswith(prefix):
            number, _, rest = key[len(prefix) :].partition(".")
            state[key] = _sliced(rest, value, kept[int(number)], full)
    draft.load_state_dict(state, strict=True)
    return draft


def activity(model: PreTrainedModel, batches: Iterable[Batch]) -> list[tuple[Tensor, Tensor]]:
    """For each layer, how much each MLP channel [I] and each group of heads [G] writes: summed norms over real tokens."""
    shape, sums, places = _shape(model), [], []
    for layer in blocks(model)[1]:
        mlp, attention = _projections(layer)
        channels = torch.zeros(0 if mlp is None else shape.channels, dtype=torch.float64)
        groups = torch.zeros(shape.groups, dtype=torch.float64)
        sums.append((channels, groups))
        if mlp is not None:
            places.append((mlp, _channels(mlp, channels)))
        if attention is not None:
            places.append((attention, _groups(attention, groups)))
    observe(model, batches, places)
    return sums


def _channels(projection: Any, sums: Tensor) -> Callable[[Tensor, Tensor], None]:
    norms = projection.weight.detach().float().norm(dim=0)

    def add(read: Tensor, wrote: Tensor) -> None:
        sums.add_((read.float().abs().sum(0) * norms).cpu())

    return add


def _groups(projection: Any, sums: Tensor) -> Callable[[Tensor, Tensor], None]:
    def add(read: Tensor, wrote: Tensor) -> None:
        parts = zip(read.float().chunk(len(sums), -1), projection.weight.detach().float().chunk(len(sums), 1), strict=True)
        sums.add_(torch.stack([(part @ columns.T).norm(dim=-1).sum() for part, columns in parts]).cpu())

    return add


def _projections(layer: nn.Module) -> tuple[Any, Any]:
    """What writes for the MLP and for the attention of a layer; None where it is not one plain linear layer."""
    found = dict(layer.named_modules())
    mlp, attention = (found.get(name) for name in ("mlp.down_proj", "self_attn.o_proj"))
    return tuple(one if isinstance(one, nn.Linear) else None for one in (mlp, attention))  # type: ignore[return-value]


def _shape(model: PreTrainedModel) -> Shape:
    text: Any = model.config.get_text_config()
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    return Shape(getattr(text, "intermediate_size", 0), heads, groups, getattr(text, "head_dim", None) or text.hidden_size // heads)


def _check(model: PreTrainedModel, full: Shape, wanted: Shape) -> None:
    """ValueError for a width that the model does not have, or that its layers cannot take."""
    name, each = type(model).__name__, full.heads // full.groups
    if wanted.channels != full.channels and not 0 < wanted.channels < full.channels:
        raise ValueError(f"{wanted.channels} MLP channels asked; {name} has {full.channels}")
    if not 0 < wanted.heads <= full.heads or wanted.heads % each:
        raise ValueError(
            f"{wanted.heads} heads asked; {name} has {full.heads}, in groups of {each} that share keys and values and go together"
        )
    for number, layer in enumerate(blocks(model)[1]):
        mlp, attention = _projections(layer)
        if wanted.channels < full.channels and mlp is None:
            raise ValueError(
                f"{name} has no single mlp.down_proj in layer {number} (experts, or another layout), so its MLP channels cannot be "
                "narrowed here; leave intermediate out"
            )
        # A norm over all heads together would see other numbers when some are gone.
        joint = (
            getattr(getattr(getattr(layer, "self_attn", None), "q_norm", None), "weight", torch.empty(0)).numel() > full.head_dim
        )
        if wanted.heads < full.heads and (attention is None or joint):
            raise ValueError(
                f"{name} {'norms its heads together' if joint else 'has no self_attn.o_proj'}, so its heads cannot be narrowed here; "
                "leave heads out"
            )


def _most(scores: Tensor, n: int) -> Tensor:
    return scores.topk(min(n, len(scores))).indices.sort().values


def _sliced(name: str, value: Tensor, kept: Kept, full: Shape) -> Tensor:
    """A weight or bias of a layer, without what goes."""
    part, each = name.rpartition(".")[0], full.heads // full.groups
    channels = kept.channels.to(value.device)
    keys = _rows(kept.groups, full.head_dim).to(value.device)
    asks = _rows(kept.groups, full.head_dim * each).to(value.device)
    wide, narrow_ = full.heads * full.head_dim, full.groups * full.head_dim
    rows = {
        "mlp.gate_proj": channels, "mlp.up_proj": channels, "mlp.gate_up_proj": torch.cat([channels, channels + full.channels]),
        "self_attn.q_proj": asks, "self_attn.k_proj": keys, "self_attn.v_proj": keys,
        "self_attn.qkv_proj": torch.cat([asks, wide + keys, wide + narrow_ + keys]),
    }  # fmt: skip
    columns = {"mlp.down_proj": channels, "self_attn.o_proj": asks}
    if part in rows:
        return value[rows[part]]
    return value[:, columns[part]] if part in columns and value.dim() == 2 else value


def _rows(which: Tensor, size: int) -> Tensor:
    """The rows of blocks of `size`: [n] -> [n * size]."""
    return (which[:, None] * size + torch.arange(size)).flatten()
