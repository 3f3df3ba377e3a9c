"""Tiny models, and rows for them, built in code: nothing here needs the network, and all of it is seeded."""

from __future__ import annotations

import copy
import hashlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)  # fmt: skip

from draftsmith.distill.batch import Batch, collate

VOCABULARY = 61
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SMALL),
    "qwen2": lambda: Qwen2Config(**_SMALL),
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=8),
    "mistral": lambda: MistralConfig(**_SMALL, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**_SMALL, head_dim=8, sliding_window=512),
    "phi3": lambda: Phi3Config(**_SMALL),
    "olmo2": lambda: Olmo2Config(**_SMALL),
    "smollm3": lambda: SmolLM3Config(**_SMALL, no_rope_layer_interval=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SMALL, head_dim=8, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
}


def tiny(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of three layers whose logits are sharp enough for greedy text that is not one token for ever."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return sharp(config, seed)


def sharp(config: Any, seed: int = 0) -> PreTrainedModel:
    """A model of `config` with weights large enough that its logits are not all alike."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(6.0 if weight.shape[0] != VOCABULARY else 3.0)
    return model


def noisy(model: PreTrainedModel, sigma: float = 0.05, seed: int = 1) -> PreTrainedModel:
    """The model plus noise relative to each weight's spread: a draft whose acceptance lies between 0 and 1."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * sigma * (weight.std() if weight.numel() > 1 else 1.0))
    return other


def batches(rows: int = 48, size: int = 8, seed: int = 0) -> list[Batch]:
    """Rows of 12 to 16 random ids, three of them the prompt's, `size` a batch."""
    generator = torch.Generator().manual_seed(seed)
    made = [(torch.randint(3, 61, (int(12 + n % 5),), generator=generator).tolist(), 3) for n in range(rows)]
    return [collate(made[at : at + size]) for at in range(0, rows, size)]


def plain_greedy(model: PreTrainedModel, prompt: list[int], n: int, eos: frozenset[int] = frozenset()) -> list[int]:
    """The one-token loop, without a cache and sharing no code with the decoder."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in eos:
                break
    return ids[len(prompt) :]


def begin(drafter: Any, histories: list[list[int]]) -> None:
    """Each history ends in the token that is to be followed; the rest is what was read, padded on the left."""
    widest = max(map(len, histories)) - 1
    ids, valid = torch.zeros(len(histories), widest, dtype=torch.long), torch.zeros(len(histories), widest, dtype=torch.bool)
    for b, history in enumerate(histories):
        if len(history) > 1:
            ids[b, widest - len(history) + 1 :] = torch.tensor(history[:-1])
            valid[b, widest - len(history) + 1 :] = True
    drafter.begin(ids, valid, torch.tensor([history[-1] for history in histories]), ())


class ScriptedLM(nn.Module):
    """A target whose logits are a pure function of the prefix (a hash of it), so the decoder's law can be enumerated.

    It keeps the prefix in transformers' own cache as a one-number key, so `CachedLM` drives it like any model.
    """

    def __init__(self, vocabulary: int, salt: str, spread: float = 1.5) -> None:
        super().__init__()
        self.vocabulary, self.salt, self.spread = vocabulary, salt, spread
        self.embedding = nn.Embedding(vocabulary, 1)
        self.config = LlamaConfig(max_position_embeddings=64, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def get_output_embeddings(self) -> nn.Module:
        return self.embedding

    get_input_embeddings = get_output_embeddings

    def law(self, prefix: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{self.salt}{prefix}".encode()).digest()
        return torch.tensor([self.spread * (byte / 128 - 1) for byte in digest[: self.vocabulary]])

    def forward(
        self, input_ids: Tensor, cache: Any = None, attention_mask: Tensor | None = None, logits_to_keep: int = 0, **_: Any
    ) -> Any:
        keys, _values = cache.update(input_ids[:, None, :, None].float(), input_ids[:, None, :, None].float(), 0)
        seen = keys[:, 0, :, 0].long()
        live = torch.ones_like(seen) if attention_mask is None else attention_mask
        columns, new = seen.shape[1], input_ids.shape[1]
        rows = []
        for b in range(len(seen)):
            prefixes = [tuple(int(seen[b, c]) for c in range(end) if live[b, c]) for end in range(columns - new + 1, columns + 1)]
            rows.append(torch.stack([self.law(prefix) for prefix in prefixes]))
        logits = torch.stack(rows)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


def tiny_tokenizer(swapped: tuple[int, int] | None = None) -> Any:
    """Bytes (and `th`) as tokens, a chat template, pad == eos; `swapped` exchanges the tokens of two ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|endoftext|>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    if swapped:
        a, b = swapped
        tokens[a], tokens[b] = tokens[b], tokens[a]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("t", "h")], unk_token="<|endoftext|>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<|endoftext|>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>a:{% endif %}"
    return tokenizer


def tiny_folder(place: Any, seed: int = 0, swapped: tuple[int, int] | None = None, **changes: Any) -> str:
    """A target on disk: a tiny llama that speaks the byte tokenizer, and sometimes EOS."""
    from draftsmith.specdec.places import quiet

    tokenizer = tiny_tokenizer(swapped)
    model = tiny("llama", seed, vocab_size=len(tokenizer), max_position_embeddings=2048, **changes)
    with quiet():
        model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def uneven(family: str = "llama", **changes: Any) -> Any:
    """A tiny model none of whose vectors is all ones or zeros, so that one left out or exchanged is seen."""
    made = tiny(family, **changes)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
    return made
