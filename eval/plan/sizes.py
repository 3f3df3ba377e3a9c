"""What a model is made of, from its config alone: it is built on torch's meta device, where weights have shapes and no numbers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version

from draftsmith.specdec.models import blocks
from draftsmith.specdec.places import locate, quiet

ATTENDS = ("full_attention", "sliding_attention", "chunked_attention")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


class Block(NamedTuple):
    """One layer: parameters, and what a token costs it."""

    dense: int  # parameters that every token uses
    experts: int  # parameters of all its experts together; 0 without any
    of: int  # how many experts there are
    used: int  # how many of them a token uses
    cached: int  # numbers that a token leaves in the cache
    window: int | None  # how many tokens it looks back on at most
    attention: int  # floating-point operations of a token for each token that it looks at
    kept: tuple[
        int, int
    ]  # numbers a token that a training forward keeps for its backward: at the stream's precision, at the products'

    def seen(self, context: int) -> int:
        """How many tokens it looks at behind `context` of them."""
        return context if self.window is None else min(context, self.window)


class Size(NamedTuple):
    """A causal model in parameters. `head` is 0 where it is the embedding; `rest` is what is neither, nor in a block (the last norm)."""

    name: str
    embedding: int
    head: int
    rest: int
    blocks: tuple[Block, ...]
    vocabulary: int  # rows of the head
    width: int
    positions: int | None
    dtype: str | None  # as the config says it

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.rest + self.layers

    @property
    def layers(self) -> int:
        return sum(one.dense + one.experts for one in self.blocks)

    @property
    def outer(self) -> int:
        """What one call reads beside the blocks; an embedding is looked up, not read, unless it is the head too."""
        return (self.head or self.embedding) + self.rest

    def touched(self, tokens: int) -> float:
        """Parameters of blocks that a call of `tokens` tokens reads: of experts the share that random routing is expected to hit."""
        hit = sum(one.experts * (1 - (1 - one.used / one.of) ** tokens) for one in self.blocks if one.experts)
        return hit + sum(one.dense for one in self.blocks)

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.outer + self.touched(1)

    def cache(self, context: int) -> int:
        """Numbers that the cache of one sequence of `context` tokens holds."""
        return sum(one.cached * one.seen(context) for one in self.blocks)

    def attention(self, context: int) -> int:
        """Floating-point operations of one token's attention behind `context` tokens."""
        return sum(one.attention * one.seen(context) for one in self.blocks)


def read_config(name: str) -> Any:
    """The config of a hub id (only config.json is fetched), a folder, a config.json, or a .gguf (its header)."""
    path = Path(name).expanduser() if name.endswith(".json") else locate(name)
    if path is not None and not path.exists():
        raise FileNotFoundError(f"{name} does not exist (looked in {path.parent.resolve()})")
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is a folder without config.json; name a hub id, a folder of a checkpoint or a config.json")
    try:
        with quiet():
            if path is not None and path.suffix == ".gguf":
                return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
            return AutoConfig.from_pretrained(str(path or name), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "" if path is not None else f"no file or folder here (looked in {Path.cwd()}), and a hub did not give it: "
        raise ValueError(f"{name}: {where}no config that transformers {transformers_version} can read: {first}") from error


def size_of(config: Any, name: str) -> Size:
    """Count the text model of `config`; ValueError where it cannot decode speculatively, or nothing is known of its cache."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is a {config.model_type}, with an encoder; only models of one stack of decoder layers are planned"
        )
    text = copy.deepcopy(config.get_text_config())
    if text.model_type != config.model_type and hasattr(config, "tie_word_embeddings"):
        text.tie_word_embeddings = config.tie_word_embeddings
    try:
        with torch.device("meta"), quiet():
            model: Any = AutoModelForCausalLM.from_config(text)
    except ValueError as error:
        raise ValueError(
            f"{name}: transformers has no causal model of type {text.model_type}: {str(error).splitlines()[0][:120]}"
        ) from error
    kinds = _kinds(text, name)
    stack = blocks(model)[1]
    if len(stack) != len(kinds):
        raise ValueError(f"{name} has {len(stack)} blocks, and its config speaks of {len(kinds)}; its cache cannot be counted")
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    own = len(stack) - shared
    layers = tuple(
        _block(one, text, window, name, cached=at < own) for at, (one, window) in enumerate(zip(stack, kinds, strict=True))
    )
    into, out = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding, head = into.numel(), 0 if out is into else out.numel()
    counted = sum(one.numel() for one in model.parameters())
    rest = counted - embedding - head - sum(one.dense + one.experts for one in layers)
    said = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    positions = getattr(text, "max_position_embeddings", None)
    dtype = None if said is None else str(said).removeprefix("torch.")
    return Size(name, embedding, head, rest, layers, out.shape[0], out.shape[1], positions, dtype)


def first(size: Size, layers: int, name: str) -> Size:
    """The first `layers` blocks between the model's own embedding and head."""
    if not 1 <= layers <= len(size.blocks):
        raise ValueError(f"{name}: {size.name} has layers 1..{len(size.blocks)}")
    return size._replace(name=name, blocks=size.blocks[:layers])


def trimmed(size: Size, rows: int) -> Size:
    """With a head of `rows` ids alone; the embedding stays whole, for a draft must read any token."""
    if not 1 <= rows <= size.vocabulary:
        raise ValueError(f"a draft vocabulary of {rows} asked; the head of {size.name} has {size.vocabulary} rows")
    return size._replace(head=rows * size.width, vocabulary=rows)


def _kinds(text: Any, name: str) -> list[int | None]:
    """For each layer how far it looks back; ValueError for one that keeps a state instead of a cache."""
    count, window = text.num_hidden_layers, getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    strange = sorted({str(one) for one in kinds if one not in ATTENDS})
    if strange or getattr(text, "num_attention_heads", None) is None:
        raise ValueError(
            f"{name} ({text.model_type}) has layers of kind {', '.join(strange) or 'no attention'}: what they remember cannot be rolled "
            "back by cutting a cache, so it is not decoded speculatively here, and not planned"
        )
    chunk = getattr(text, "attention_chunk_size", None)
    return [{"full_attention": None, "sliding_attention": window, "chunked_attention": chunk}[one] for one in kinds]


def _block(layer: Any, text: Any, window: int | None, name: str, cached: bool) -> Block:
    heads, pairs = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys, attention = 2 * pairs * dim, 4 * heads * dim
    if latent := getattr(text, "kv_lora_rank", None):  # as engines serve it; transformers keeps what it is expanded to
        keys, attention = latent + text.qk_rope_head_dim, 2 * heads * (2 * latent + text.qk_rope_head_dim)
    experts = products = total = of = normed = 0
    for what, weight in layer.named_parameters():
        total += weight.numel()
        if ".experts." in f".{what}":
            experts += weight.numel()
            of = _of(text, EXPERTS, name)
        elif weight.dim() > 1 and "attn" not in what and "attention" not in what:
            products += weight.numel()
        elif what.endswith("weight") and weight.dim() == 1:
            normed += heads * dim if "q_norm" in what else pairs * dim if "k_norm" in what else weight.numel()
    used = _of(text, USED, name) if experts else 0
    wide = (products + (experts * used / of if experts else 0)) / (3 * text.hidden_size)  # of a gated MLP: in, gate and out
    # A norm keeps what goes in, that scaled, and what comes out. Products: queries and what attention gave, keys and values, and
    # four widths of the MLP (gate, its activation, up, what they make together).
    kept = (3 * normed, 2 * heads * dim + keys + round(4 * wide))
    return Block(total - experts, experts, of, used, keys if cached else 0, window, attention, kept)


def _of(text: Any, names: tuple[str, ...], name: str) -> int:
    found = next((getattr(text, one) for one in names if getattr(text, one, None)), None)
    if found is None:
        raise ValueError(
            f"{name} has experts, and its config says none of {', '.join(names)}; what a token reads cannot be counted"
        )
    return int(found)
