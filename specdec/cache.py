"""A language model that can be fed tokens and made to forget them; transformers' cache is touched here and in cache_layers.py alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from draftsmith.specdec.cache_layers import gives_nothing_back, new_cache, positions, records_past

COUNTS_COLUMNS = {"mpt"}  # its ALiBi distances are taken between cache columns, used or not, whatever position_ids say


class CachedLM:
    """A causal model with a cache of its own for `batch_size` rows; every row may hold another number of live tokens.

    Tokens that a row does not have (padding, refused drafts) stay in their column and are masked; columns that no row
    uses any more are cut off the end. Zeroing such columns instead would leak: a key of zeros still draws attention.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int, cache: DynamicCache | None = None) -> None:
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; only decoder-only models can be decoded here")
        self.model = model
        self.batch_size = batch_size
        self._device = model.device  # a walk of the module tree each time it is asked
        self.config = model.config.get_text_config()
        self.max_positions = positions(self.config)
        self._cache = new_cache(model.config) if cache is None else cache
        self._records_past = records_past()
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self._columns = 0
        self._mask: Tensor | None = None  # [B, columns]: which row uses which column; None where every row uses all
        self._modules = list(model.modules())  # walking the tree anew would cost more than a small model's forward
        self._seen_windows: list[int | None] | None = None
        self._rolls_back = False  # known once the cache holds something

    @property
    def live(self) -> Tensor:
        """Which row uses which column: [B, columns] bool."""
        if self._mask is not None:
            return self._mask
        return torch.ones(self.batch_size, self._columns, dtype=torch.bool, device=self._device)

    @property
    def lengths(self) -> Tensor:
        """Live tokens of each row: [B]."""
        if self._mask is None:
            return torch.full((self.batch_size,), self._columns, device=self._device)
        return self._mask.sum(-1)

    @property
    def columns(self) -> int:
        """Columns of the cache, used by some row or not."""
        return self._columns

    @torch.inference_mode()
    def extend(
        self, ids: Tensor, valid: Tensor | None, hidden_layers: Sequence[int] = (), keep: int | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Feed `ids` [B, T] of which only `valid` [B, T] exist (None: all) -> logits [B, T, V], hidden states ([B, T, H] a layer).

        `hidden_layers` counts as transformers does: 0 is the embedding, i the output of layer i, the last one normed.
        `keep` limits the logits to the last `keep` columns, since the head is most of the cost of a prefill; 0 leaves the head out.
        """
        batch, columns = ids.shape
        if batch != self.batch_size or (valid is not None and valid.shape != ids.shape):
            found = f"ids {list(ids.shape)}, valid {list(valid.shape) if valid is not None else None}"
            raise ValueError(f"this cache holds {self.batch_size} rows, found {found}")
        if valid is not None and self._mask is None and bool(valid.all()):
            valid = None
        mask = None
        if valid is not None or self._mask is not None:
            mask = torch.cat(
                [self.live, (torch.ones_like(ids, dtype=torch.bool) if valid is None else valid).to(self._device)], dim=1
            )
        self._refuse_unservable(mask, self._columns + columns)
        settings: dict[str, Any] = {self._cache_name: self._cache, "use_cache": True}
        if mask is not None:
            settings["attention_mask"] = mask.long()
            settings["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -columns:]
        if keep:
            settings["logits_to_keep"] = keep
        if hidden_layers:
            settings["output_hidden_states"] = True
        with _evaluating(self._modules):
            out = (self.model.base_model if keep == 0 else self.model)(input_ids=ids.to(self._device), **settings)
        self._mask, self._columns = mask, self._columns + columns
        logits = out.logits if keep != 0 else torch.empty(batch, 0, 0, device=self._device)
        return logits, tuple(out.hidden_states[layer] for layer in hidden_layers)

    def forget(self, n: Tensor | Sequence[int]) -> None:
        """Drop the last n[b] live tokens of row b, n [B] >= 0; the next `extend` goes on from there."""
        counts = n.tolist() if isinstance(n, Tensor) else list(n)
        if self._mask is None and min(counts) == max(counts) and 0 <= counts[0] <= self._columns:
            self._crop(counts[0])
            return
        live, n = self.live, torch.tensor(counts, device=self._device)
        if bool((n > live.sum(-1)).any()) or min(counts) < 0:
            raise ValueError(f"cannot forget {counts} of {live.sum(-1).tolist()} live tokens")
        from_the_end = live.flip(-1).long().cumsum(-1).flip(-1)  # 1 at the last live token, 2 before it ...
        live = live & (from_the_end > n[:, None])
        used = live.any(0).nonzero()
        columns = int(used[-1]) + 1 if len(used) else 0
        self._crop(live.shape[1] - columns)
        live = live[:, :columns]
        self._mask = None if bool(live.all()) else live

    def _crop(self, columns: int) -> None:
        """Cut columns off the end; also asked for 0, for sliding layers trim then what they recorded for this call."""
        if (reason := self.cannot_roll_back()) is None:
            if columns or self._records_past:  # caches that keep no past take 0 for the length to crop to
                self._cache.crop(-columns)
        elif columns:
            raise ValueError(reason)
        self._columns -= columns

    def select(self, rows: Tensor) -> None:
        """Keep `rows` of the batch (indices, ascending), and of the columns those that one of them uses from the right."""
        rows = rows.to(self._device)
        self._mask = self.live[rows]
        self.batch_size = len(rows)
        self._cache.batch_select_indices(rows)
        self.forget([0] * len(rows))

    def cannot_roll_back(self) -> str | None:
        """Why this model's cache cannot forget, or None where it can. Asked after the first `extend`, which builds the layers."""
        if self._rolls_back:
            return None
        if layer := gives_nothing_back(self._cache):
            return (
                f"{type(self.model).__name__} keeps a {layer}, which cannot give back refused tokens: "
                "speculation would not be lossless. Decode it without a drafter."
            )
        self._rolls_back = self._columns > 0
        return None

    @property
    def window(self) -> int | None:
        """Columns that the narrowest sliding layer attends to; None where no layer slides."""
        return min((one for one in self._windows() if one is not None), default=None)

    def _windows(self) -> list[int | None]:
        if self._seen_windows is None or len(self._seen_windows) != len(self._cache.layers):  # older caches make their layers late
            self._seen_windows = [getattr(layer, "sliding_window", None) for layer in self._cache.layers]
        return self._seen_windows

    @property
    def room(self) -> int | None:
        """Columns that a cache which is to forget may hold; None where sliding layers limit nothing."""
        if self.window is None or (self._records_past and self.batch_size == 1):
            return None
        return self.window if self._records_past else self.window - 1  # without a past, a full layer gives nothing back

    def refuse_ahead(self, columns: int, drafting: bool) -> None:
        """ValueError now for what a call that needs up to `columns` would meet later, when its text would be lost with it."""
        if self.window is None:
            return
        if self.batch_size > 1 and columns > self.window:
            raise ValueError(self._loses_tokens(self.window, columns))
        if drafting and self.room is not None and columns > self.room:
            raise ValueError(
                f"{type(self.model).__name__} attends to a window of {self.window} columns, of which this transformers gives refused "
                f"tokens back only while no more than {self.room} are used; {columns} may be needed. Decode it without a drafter, "
                "write fewer tokens, or take a newer transformers, which records the past of sliding layers"
            )

    def _loses_tokens(self, window: int, columns: int) -> str:
        # The window is counted in columns, and columns that a row does not use would push its own tokens out.
        return (
            f"{type(self.model).__name__} attends to a window of {window} columns and a batch of rows with unequal lengths needs "
            f"{columns}: it would lose tokens. Decode one prompt at a time."
        )

    def _refuse_unservable(self, mask: Tensor | None, columns: int) -> None:
        longest = columns if mask is None else int(mask.sum(-1).max())
        if self.max_positions is not None and longest > self.max_positions:
            raise ValueError(f"{longest} tokens asked, {type(self.model).__name__} has {self.max_positions} positions")
        windows = self._windows()
        if 1 in windows:
            raise ValueError(
                f"{type(self.model).__name__} has a window of 1 token, which transformers' cache keeps wrongly; it cannot be decoded here"
            )
        if mask is None:
            return
        if self.config.model_type in COUNTS_COLUMNS:
            raise ValueError(
                f"{type(self.model).__name__} counts positions by columns and cannot skip padding; decode one prompt at a time"
            )
        for layer, window in zip(self._cache.layers, windows, strict=True):
            if window is not None and columns > window:
                raise ValueError(self._loses_tokens(window, columns))
            if self.cannot_roll_back() is not None:
                raise ValueError(f"{type(layer).__name__} cannot skip padding; decode one prompt at a time")


@contextmanager
def _evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """Dropout off while decoding; every sub-module gets its own mode back. The root alone may say eval, so all are asked."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
