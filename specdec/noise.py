"""Where a row's random numbers come from: streams that hang on the row alone, in whatever batch it is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


class RowNoise:
    """Random numbers keyed by (seed, row, tokens written): a row's noise depends on nothing else, in whatever batch."""

    def __init__(self, seed: int | Sequence[int], rows: int, wanted: bool) -> None:
        self._seeds = [f"{seed}/{row}" for row in range(rows)] if isinstance(seed, int) else [f"{one}" for one in seed]
        self._wanted = wanted  # at temperature 0 every law is one-hot and the noise changes nothing
        self.draft = [torch.Generator().manual_seed(0) for _ in range(rows)]
        self.verify = [torch.Generator().manual_seed(0) for _ in range(rows)]

    def next_round(self, written: list[list[int]]) -> None:
        if not self._wanted:
            return
        for stream, generators in (("draft", self.draft), ("verify", self.verify)):
            for seed, row, generator in zip(self._seeds, written, generators, strict=True):
                digest = hashlib.blake2b(f"{stream}/{seed}/{len(row)}".encode(), digest_size=7).digest()
                generator.manual_seed(int.from_bytes(digest, "big"))

    def select(self, rows: list[int]) -> None:
        """Only these rows go on, each with its own stream."""
        self._seeds = [self._seeds[row] for row in rows]
        self.draft, self.verify = [self.draft[row] for row in rows], [self.verify[row] for row in rows]
