"""A small language model drafts: its own cache, its own law, one forward a drafted token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.specdec.cache import CachedLM
from draftsmith.specdec.drafters.base import Outcome, Proposal
from draftsmith.specdec.drafters.trimmed import check_ids, trimmed_view
from draftsmith.specdec.models import output_rows
from draftsmith.specdec.sampling import Generator, Sampling, draw, to_probs, uniform


class ModelDrafter:
    """Drafts with `model`, which must speak the target's token ids.

    `vocab_size` is how many ids the target can say; draft ids beyond it are masked before the softmax, so no mass is lost
    to them. `ids` [V'], ascending, is for a draft that says these alone: a head with as many rows speaks them in their order, a longer one
    is cut to them. Rows that outgrow the draft's positions, or hold a token that it cannot embed, are no longer drafted for (`paused`).
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None, ids: Tensor | None = None) -> None:
        if vocab_size is not None and vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} leaves the draft no id to say; give the number of ids of the target")
        embedding: Any = model.get_input_embeddings()
        self._notes: dict[int, str] = {}
        self._known = int(embedding.weight.shape[0])
        self._says: Tensor | None = None  # which id each of its logits is for, where that is not its own place
        if ids is not None:
            self._says = check_ids(ids, min(self._known, vocab_size or self._known), "the ids of a draft").to(model.device)
            if output_rows(model) != len(ids):
                model = trimmed_view(model, self._says)
        self.model = model
        self.vocab_size = vocab_size

    @property
    def ids(self) -> int:
        """How many ids it can say."""
        return min(output_rows(self.model), self.vocab_size or output_rows(self.model))

    def begin(self, ids: Tensor, valid: Tensor, last: Tensor, hidden: tuple[Tensor, ...] = ()) -> None:
        batch = len(ids)
        self._lm = self._reader(ids, valid)
        if reason := self._lm.cannot_roll_back():
            raise ValueError(f"as a draft: {reason}")
        self._rows = list(range(batch))  # which row of the prompts each row was, for the notes
        self._notes = {}
        self.paused = [False] * batch
        self._said: list[list[int]] = [[] for _ in range(batch)]
        self._fed = [0] * batch  # how many of the tokens just said the cache holds
        # What the row holds and the cache does not yet; fed with the next proposal.
        texts = zip(ids.tolist(), valid.tolist(), last.tolist(), strict=True)
        self._pending = [[*(one for one, real in zip(text, there, strict=True) if real), end] for text, there, end in texts]
        self._pause_strangers(self._pending)

    def _reader(self, ids: Tensor, valid: Tensor) -> Any:
        """What reads for the draft, and forgets: a cache of its own."""
        return CachedLM(self.model, len(ids))

    def read(self) -> None:
        """Feed what is pending but for each row's last token, so that the first proposal is no dearer than the next."""
        self._room()
        self._feed([text[:-1] for text in self._pending])
        self._pending = [text[-1:] for text in self._pending]

    def propose(self, k: int, how: Sampling, generator: Generator = None, rows: Tensor | None = None) -> Proposal:
        """Up to `k` tokens for each of `rows` [B] (bool; None for all). The others rest: nothing of theirs is fed, and
        `observe` must be told what was said for them."""
        batch, device = len(self._pending), self.model.device
        n = [max(0, min(room, k)) for room in self._room()]  # a row near the end of the draft's positions drafts what still fits
        if rows is not None:
            n = [count if asked else 0 for count, asked in zip(n, rows.tolist(), strict=True)]
        steps, laws = [], []
        if any(n):
            logits = self._feed([text if count else [] for text, count in zip(self._pending, n, strict=True)])
            self._pending = [[] if count else text for text, count in zip(self._pending, n, strict=True)]
            for step in range(1, max(n) + 1):
                logits = logits[:, -1, : self.vocab_size]
                if how.temperature == 0:
                    steps.append(self._named(logits.argmax(-1, keepdim=True)))
                else:
                    laws.append(to_probs(logits, how))
                    drawn = draw(laws[-1], noise=uniform(batch, 1, generator, device)[:, 0])
                    steps.append(self._named(drawn[:, None]))
                if step < max(n):
                    more = None if min(n) > step else torch.tensor([[count > step] for count in n])
                    logits, _ = self._lm.extend(steps[-1], more, keep=1)
        tokens = torch.cat(steps, dim=1) if steps else torch.empty(batch, 0, dtype=torch.long, device=device)
        self._said, self._fed = tokens.tolist(), [max(count - 1, 0) for count in n]  # a row's last draft is never fed
        # At temperature 0 each law is one-hot on its token, which is what None says, without [B, K, V] numbers.
        probs = self._spread(torch.stack(laws, dim=1)) if laws else None
        return Proposal(tokens, probs, torch.tensor(n, device=device))

    def observe(self, outcome: Outcome, said: Proposal | None = None) -> None:
        """`said` is what was proposed to the target, where others spoke for the rows that rested."""
        accepted, following = outcome.accepted.tolist(), outcome.next.tolist()
        texts = self._said if said is None else said.tokens.tolist()
        if any(self._fed):
            refused = [max(fed - kept, 0) for fed, kept in zip(self._fed, accepted, strict=True)]
            self._lm.forget(refused)
        new = [[*text[fed:kept], token] for text, fed, kept, token in zip(texts, self._fed, accepted, following, strict=True)]
        # What a paused row still gets need not be kept; its last token alone says that there is a row.
        self._pending = [now if off else had + now for had, now, off in zip(self._pending, new, self.paused, strict=True)]
        self._said, self._fed = [[] for _ in new], [0] * len(new)
        self._pause_strangers(new)

    @torch.inference_mode()
    def laws(self, text: list[int], n: int, how: Sampling) -> Iterator[Tensor] | None:
        """Its laws of the last `n` tokens of `text`, each behind all those before it, `STRETCH` places at a time ([m, V], fp32): one
        forward, no history. None where the text does not fit the draft; a decoder would do some of it plainly.
        """
        lm = CachedLM(self.model, 1)
        if max(text) >= self._known or len(text) - 1 > (lm.max_positions or NO_LIMIT):
            return None
        logits, _ = lm.extend(torch.tensor([text[:-1]]), None, keep=n)
        return (self._spread(to_probs(some, how)) for some in logits[0, :, : self.vocab_size].split(STRETCH))

    def select(self, rows: Tensor) -> None:
        self._lm.select(rows.to(self.model.device))
        left = rows.tolist()
        self._rows, self.paused = [self._rows[row] for row in left], [self.paused[row] for row in left]
        self._said, self._fed = [self._said[row] for row in left], [self._fed[row] for row in left]
        self._pending = [self._pending[row] for row in left]

    def evidence(self) -> list[int]:
        """0 for a row that the model speaks for, -1 for one that it cannot."""
        self._room()
        return [-1 if paused else 0 for paused in self.paused]

    def notes(self) -> list[str]:
        """A line for each row that is no longer drafted for, and why."""
        return [self._notes[row] for row in sorted(self._notes)]

    def _named(self, places: Tensor) -> Tensor:
        """Places among its logits -> ids of the target."""
        return places if self._says is None else self._says[places]

    def _spread(self, laws: Tensor) -> Tensor:
        """Laws over its logits [..., V'] -> over the ids of the target, up to the last that it can say; 0 for those that it cannot."""
        if self._says is None:
            return laws
        return laws.new_zeros(*laws.shape[:-1], int(self._says[-1]) + 1).index_copy_(-1, self._says, laws)

    def _feed(self, texts: list[list[int]]) -> Tensor:
        """Read what each row has to read, right-aligned; the logits behind the last column, [B, 1, V]."""
        counts = [len(text) for text in texts]
        width = max(counts)
        if not width:
            return torch.empty(0)
        ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
        valid = torch.arange(width) >= width - torch.tensor(counts)[:, None] if min(counts) < width else None
        first = not self._lm.columns
        logits, _ = self._lm.extend(ids, valid, keep=1)
        if first and (reason := self._lm.cannot_roll_back()):  # some layers know it only once they hold something
            raise ValueError(f"as a draft: {reason}")
        return logits

    def _room(self) -> list[int]:
        """How many tokens each row can still draft. Text only grows, so a row with no room is paused for good."""
        limit, window, room = self._lm.max_positions, self._lm.room, [NO_LIMIT] * len(self._pending)
        if limit is not None:
            held = self._lm.lengths.tolist()
            room = [limit - there - len(text) + 1 for there, text in zip(held, self._pending, strict=True)]
            for row, left in enumerate(room):
                if left < 1:
                    self._pause(row, f"outgrew the draft's {limit} positions and was decoded plainly")
        if window is not None:  # it counts columns, and rows of a batch share them
            left = window - self._lm.columns - max(map(len, self._pending)) + 1
            room = [min(one, left) for one in room]
            if left < 1:
                for row in range(len(room)):
                    self._pause(row, f"would not fit the draft's window of {self._lm.window} and was decoded plainly")
        return [0 if paused else one for paused, one in zip(self.paused, room, strict=True)]

    def _pause_strangers(self, texts: list[list[int]]) -> None:
        for row, text in enumerate(texts):
            if max(text) >= self._known:
                self._pause(row, f"holds an id that the draft cannot embed (it has 0..{self._known - 1}) and was decoded plainly")

    def _pause(self, row: int, why: str) -> None:
        if not self.paused[row]:
            self._notes[self._rows[row]] = f"row {self._rows[row]} {why}"
        # What it still gets need not be kept; its last token alone says that there is a row.
        self.paused[row], self._pending[row] = True, self._pending[row][-1:]


NO_LIMIT = 1 << 62
STRETCH = 64  # places whose laws exist at a time
