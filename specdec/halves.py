"""A model cut in two between two of its layers: both halves are models of its class, and what joins them is one layer that both hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.specdec.models import blocks, shell


class Seam(nn.Module):
    """The last layer below the cut: the lower half runs it, and the upper half begins with what it gave."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._taken: Tensor | None = None
        self._given: Tensor | None = None
        self._in_a_tuple = False  # so some families' layers return it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # bodies ask a layer for its kind of attention

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._given is not None:
            return (self._given,) if self._in_a_tuple else self._given
        out = self.layer(*inputs, **named)
        self._in_a_tuple = isinstance(out, tuple)
        self._taken = out[0] if self._in_a_tuple else out
        return out

    def taken(self) -> Tensor:
        """What the last call of the lower half left, [B, T, H]; it is kept no longer."""
        taken, self._taken = self._taken, None
        if taken is None:
            raise ValueError("the layer before the exit did not run")
        return taken

    @contextmanager
    def giving(self, states: Tensor) -> Iterator[None]:
        self._given = states
        try:
            yield
        finally:
            self._given = None


def halves(target: PreTrainedModel, view: PreTrainedModel, layer: int) -> tuple[PreTrainedModel, PreTrainedModel, Seam]:
    """`view` and the rest of `target` above its first `layer` layers as models, joined by a seam. All else is shared, nothing changed.

    The upper half goes through the whole of the model's forward, embedding included, for what families do before their first
    layer differs; the seam, as the first of its layers, then puts the states in the place of all that.
    """
    name, layers = blocks(target)
    own = blocks(view)[1]
    if any("forward" in vars(one) for one in (target, target.base_model)):
        raise ValueError(f"{type(target).__name__} has a wrapped forward (compiled, or with hooks), which would run all its layers")
    if any(one is not other for one, other in zip([*own[:layer], view.get_input_embeddings()], [*layers[:layer], target.get_input_embeddings()], strict=True)):  # fmt: skip
        raise ValueError(f"its embedding and first {layer} layers are not the target's own")
    seam = Seam(layers[layer - 1])
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[layer - 1 :]
    text.num_hidden_layers = len(layers) - layer + 1
    lower = _with_layers(view, name, [*own[: layer - 1], seam, *own[layer:]], view.config)
    return lower, _with_layers(target, name, [seam, *layers[layer:]], config), seam


def _with_layers(model: PreTrainedModel, name: str, layers: list[nn.Module], config: Any) -> PreTrainedModel:
    whole, body = shell(model), shell(getattr(model, model.base_model_prefix))
    whole.config = body.config = config
    setattr(body, name, nn.ModuleList(layers))
    setattr(whole, model.base_model_prefix, body)
    return whole
