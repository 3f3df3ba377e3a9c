"""Configs of published Llamas, made in code: what the pages on plans and clusters compute their figures from."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

LLAMAS = {  # what the pages call them: width, MLP, layers, heads, tied
    "llama-3.2-1b": (2048, 8192, 16, 32, True),
    "llama-3.1-8b": (4096, 14336, 32, 32, False),
    "llama-3.1-70b": (8192, 28672, 80, 64, False),
}


def save_llamas(folder: Path) -> None:
    """Each as a folder of its name."""
    for name, (wide, mlp, layers, heads, tied) in LLAMAS.items():
        LlamaConfig(
            vocab_size=128256, hidden_size=wide, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
            tie_word_embeddings=tied, max_position_embeddings=131072, dtype="bfloat16",
        ).save_pretrained(folder / name)  # fmt: skip
