"""The objective that teaches exits of a frozen target: one forward of its layers gives every exit's states and, at its end, the teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.batch import Batch
from draftsmith.distill.chunked import Asked, columns, judged, scored_loss, sums
from draftsmith.distill.draft import JUDGED, Origin
from draftsmith.distill.head import Head, Logits, last_hidden
from draftsmith.distill.losses import loss_named
from draftsmith.distill.objective import Loss
from draftsmith.distill.signal import Dense, Overlap
from draftsmith.distill.teacher import LiveTeacher
from draftsmith.distill.warm.trunk import Seen, watch
from draftsmith.specdec.drafters.early_exit import exit_model
from draftsmith.specdec.drafters.exit_costs import memory_bound_speed_up, share_of_a_step
from draftsmith.specdec.drafters.exit_files import sample, write_exits
from draftsmith.specdec.drafters.exit_heads import AdapterExit, BlockExit, ExitSettings, LoraExit, make_head
from draftsmith.specdec.drafters.trimmed import check_ids, write_ids


class Exits(nn.Module):
    """The heads of several exits of one target, by layer. The target's weights are no part of it, nor of its state."""

    target: PreTrainedModel
    _own_trunks: dict[int, PreTrainedModel]

    def __init__(self, target: PreTrainedModel, exits: Sequence[ExitSettings]) -> None:
        super().__init__()
        if not exits or len({one.layer for one in exits}) < len(exits):
            raise ValueError(
                f"exits after layers {[one.layer for one in exits]} asked; name at least one, and each layer at most once"
            )
        object.__setattr__(self, "target", target)
        self.asked = sorted(exits, key=lambda one: one.layer)
        self.heads = nn.ModuleDict({str(one.layer): make_head(target, one) for one in self.asked})
        own_trunks = {one: exit_model(target, one, head) for one, head in self.by_layer().items() if isinstance(head, LoraExit)}
        object.__setattr__(self, "_own_trunks", own_trunks)

    def by_layer(self) -> dict[int, Any]:
        return {one.layer: self.heads[str(one.layer)] for one in self.asked}

    def watch(self, batch: Batch) -> Seen:
        """One forward of the target over the batch, with all that the heads need of it."""
        heads = self.by_layer().items()
        layers = [layer for layer, head in heads if not isinstance(head, LoraExit)]
        return watch(self.target, layers, [layer for layer, head in heads if isinstance(head, BlockExit)], batch)

    def forward(self, seen: Seen, batch: Batch) -> list[Tensor]:
        """What the output head reads of each exit at the scored positions, the shallowest first: [N, H] each."""
        found = []
        for layer, head in self.by_layer().items():
            if isinstance(head, AdapterExit):
                found.append(head(seen.after[layer][batch.scored]))
            elif isinstance(head, BlockExit):
                call = seen.next[layer]
                found.append(head(seen.after[layer], *call.asked, **call.named)[batch.scored])
            else:
                found.append(last_hidden(self._own_trunks[layer], batch.ids, batch.documents)[batch.scored])
        return found


class DistillExits:
    """Teach the heads of `exits` the target's laws at the scored positions, as `DistillDraft` teaches a draft: for `loss`, `chunk`,
    `support`, `temperature` and `ids` see there. The target is frozen and its weights are never written.

    `weights` (one an exit; all 1 where none are given) are made to add up to 1: the loss and the figures are means over the exits
    by them, and so is the held-out figure by which a checkpoint is chosen. Heads share no parameter, so a weight moves an exit's own
    slope and what the clipping leaves of the others'. `by` and `k` say which exit of a saved folder is taken where none is named: the one
    whose held-out tokens a call (`by`, with `k` drafted) are worth most against the weights that it reads (`memory_bound_speed_up`).
    """

    def __init__(
        self, target: PreTrainedModel, exits: Sequence[ExitSettings], loss: Mapping[str, float] | str = "forward_kl",
        weights: Sequence[float] | None = None, chunk: int = 128, support: Tensor | None = None, origin: Origin | None = None,
        temperature: float = 1.0, ids: Tensor | None = None, real: int | None = None, by: str = "block_length", k: int = 4,
    ) -> None:  # fmt: skip
        losses = {loss: 1.0} if isinstance(loss, str) else dict(loss)
        for name in losses:
            loss_named(name)
        head = LiveTeacher(target, real).head  # freezes the target, and refuses one that it cannot follow
        self._sample = sample(target)  # here, where all processes are, for a target that is sharded
        given = [1.0] * len(exits) if weights is None else list(weights)
        if len(given) != len(exits) or min(given) <= 0:
            raise ValueError(f"{len(exits)} exits need as many weights above 0, found {given}")
        self.origin, self.by, self.k = origin, by, k
        device = head.linear.weight.device
        if ids is not None:
            ids = check_ids(ids, head.rows, "the draft's ids").to(device)
        if support is not None and ids is not None and not bool(torch.isin(support, ids.cpu()).all()):
            raise ValueError("a support holds ids that the draft cannot say; leave them out of it")
        self._take(target, exits, head, given, Asked(losses, chunk, temperature, ids), support)

    @classmethod
    def of_shapes(
        cls, target: PreTrainedModel, exits: Sequence[ExitSettings], asked: Asked, support: Tensor | None
    ) -> DistillExits:
        """The same of a target whose tensors have shapes and no numbers, of which nothing can be checked (`exit_memory`)."""
        made = cls.__new__(cls)
        made._take(target, exits, Head(target), [1.0] * len(exits), asked, support)
        return made

    def _take(
        self, target: PreTrainedModel, exits: Sequence[ExitSettings], head: Head, weights: Sequence[float], asked: Asked,
        support: Tensor | None,
    ) -> None:  # fmt: skip
        self.head, self.exits = head, Exits(target, exits)
        self.trainable: nn.Module = self.exits  # may be wrapped by a loop for several processes; `exits` stays bare
        self.draft = self.exits  # by the name under which a run knows what it trains
        by_layer = {one.layer: weight / sum(weights) for one, weight in zip(exits, weights, strict=True)}
        self.shares: Mapping[str, float] = {str(layer): by_layer[layer] for layer in sorted(by_layer)}
        self.figures: Mapping[str, Mapping[str, float]] = {}
        self.asked, self.support = asked, support
        self._narrow = None if support is None else head.over(support.to(head.linear.weight.device))
        self._speaks: Logits = head if asked.ids is None else head.over(asked.ids)

    def loss(self, batch: Batch) -> Loss:
        batch = batch.to(self.head.linear.weight.device)
        seen = self.exits.watch(batch)
        # An accelerator hands out float32, and the head reads what its own weights are in.
        hidden = [one.to(seen.last.dtype) for one in self.trainable(seen, batch)]
        training = self.exits.training  # DeepSpeed's wrapper does not know its own
        total, found = self._chunks(batch, seen.last, hidden, training)
        if training:
            heard = Dense(seen.last, self.head)
            found = [[judged(one, self._speaks, heard, self.asked, JUDGED)] for one in hidden]
        each = {name: Overlap(*map(torch.cat, zip(*parts, strict=True))) for name, parts in zip(self.shares, found, strict=True)}
        return Loss(total, self._figures(each, len(seen.last)), None, None if training else each)

    def _chunks(self, batch: Batch, last: Tensor, hidden: list[Tensor], training: bool) -> tuple[Tensor, list[list[Overlap]]]:
        """The weighted loss, what the target says made once a chunk for all exits; outside of training what each exit is worth there, too."""
        narrow = self._narrow if training else None
        speaks, listens = (self._speaks, self.head) if narrow is None else (narrow, narrow)
        asked = self.asked if narrow is None else self.asked._replace(ids=None)
        said = columns(batch.ids.roll(-1, 1)[batch.scored], self.asked.ids if narrow is None else self.support)
        total, found = torch.zeros((), device=last.device), [list[Overlap]() for _ in hidden]
        parts = zip(last.split(asked.chunk), said.split(asked.chunk), *(one.split(asked.chunk) for one in hidden), strict=True)
        for theirs, tokens, *ours in parts:
            with torch.no_grad():
                heard = Dense(listens(theirs), _as_it_is)
            for share, part, worth in zip(self.shares.values(), ours, found, strict=True):
                total = total + share * scored_loss(part, speaks, heard, asked, (), tokens)
                if not training:
                    worth.append(judged(part, speaks, heard, asked))
        return total, found

    def _figures(self, each: Mapping[str, Overlap], scored: int) -> dict[str, Tensor]:
        """Means over the exits by their shares, and each one's own acceptance and agreement."""
        own = {name: sums(one) for name, one in each.items()}
        first = next(iter(own.values()))
        figures = {what: torch.stack([share * own[name][what] for name, share in self.shares.items()]).sum() for what in first}
        figures |= {f"{what} after {name}": own[name][what] for name in own for what in ("acceptance", "agreement")}
        return figures | {"judged": first["judged"], "scored": torch.tensor(float(scored))}

    def default(self) -> int:
        """The exit that is taken where none is named; before any evaluation the shallowest."""
        heads = self.exits.by_layer()
        if not self.figures:
            return min(heads)
        rows = None if self.asked.ids is None else len(self.asked.ids)
        worth = {
            layer: memory_bound_speed_up(
                self.figures[str(layer)][self.by], self.k, share_of_a_step(self.exits.target, layer, head, rows)
            )
            for layer, head in heads.items()
        }
        return max(worth, key=worth.__getitem__)

    def save(self, folder: Path) -> None:
        """The heads alone, with drafter.json: see `exit_files`."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {} if self.asked.ids is None else write_ids(folder, self.asked.ids)
        about = {} if self.origin is None else {"target": self.origin.target, "revision": self.origin.revision}
        told = {int(name): figures for name, figures in self.figures.items()}
        pairs = list(zip(self.exits.asked, self.exits.by_layer().values(), strict=True))
        write_exits(folder, self.exits.target, pairs, self.default(), told, settings, about, self._sample)


def _as_it_is(logits: Tensor) -> Tensor:
    return logits
