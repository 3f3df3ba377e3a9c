"""How often a draft stays, by its place and by what it rests on, as the last rounds had it: the text changes, so old ones fade."""

from __future__ import annotations

from collections import defaultdict

MEMORY = 0.97  # of what was seen a round ago, so about 30 rounds count
KNOWN = 4.0  # trials before an acceptance is more than a guess


class Chances:
    """Of drafts that were tried: one behind the first that was refused was not."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])  # (bucket, place): accepted, tried

    def saw(self, evidence: int, drafted: int, accepted: int) -> None:
        for place in range(min(accepted + 1, drafted)):
            kept = self._kept[bucket(evidence), place]
            kept[0] = MEMORY * kept[0] + (place < accepted)
            kept[1] = MEMORY * kept[1] + 1

    def knows(self, evidence: int) -> bool:
        return self._kept[bucket(evidence), 0][1] >= KNOWN

    def each(self, evidence: int, places: int) -> list[float]:
        """Chance that each of the first `places` drafts stays, those before it having stayed. What is little known of a place is
        filled up with what holds one place earlier, and of the first with one half."""
        chances, before = [], 0.5
        for place in range(places):
            accepted, tried = self._kept[bucket(evidence), place]
            before = (accepted + before) / (tried + 1.0)
            chances.append(before)
        return chances


def bucket(evidence: int) -> int:
    """Lookups are kept apart by the length of their match, up to where longer ones no longer differ."""
    return evidence if evidence < 5 else 5 if evidence < 8 else 8
