"""What followed every context of a text, in a trie that grows only where the text repeats itself: a token costs a bounded number of steps."""

from __future__ import annotations

END = -1  # behind each text; no token has this id


class Suffixes:
    """For each context of up to `depth` tokens: how often each token followed it, and which did most often, last of equals.

    A context that occurred once is a leaf that points into the text; it becomes nodes when it occurs again, one level at
    a time. A token costs at most `depth` + 1 look-ups, and text without repeats about one leaf a token.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._text: list[int] = []
        self._child: dict[tuple[int, int], int] = {}  # (node, token) -> node
        self._count, self._total = [0], [0]  # of each node: its occurrences, and those that something follows
        self._best, self._goes_on = [(END, 0)], [END]  # of each node: its first follower and that node; of a leaf, where it goes on
        self._ends = [0]  # the nodes of the contexts that the text ends with and that occurred before, shortest first

    def append(self, token: int) -> None:
        """The text goes on with `token`."""
        self._text.append(token)
        ends = [0]
        for node in self._ends:
            child = self._child.get((node, token))
            if child is None:
                child = self._leaf(node, token, len(self._text))
            else:
                self._count[child] += 1
                if len(ends) <= self.depth:
                    ends.append(child)
                    self._open(child)
            self._total[node] += 1
            if self._count[child] >= self._count[self._best[node][1]]:
                self._best[node] = token, child
        self._ends = ends

    def close(self) -> None:
        """The text ends; what is appended next begins another one."""
        self._text.append(END)
        self._ends = [0]

    def _leaf(self, node: int, token: int, goes_on: int) -> int:
        self._child[node, token] = leaf = len(self._count)
        self._count.append(1)
        self._total.append(0)
        self._best.append((END, 0))
        self._goes_on.append(goes_on)
        return leaf

    def _open(self, node: int) -> None:
        place, self._goes_on[node] = self._goes_on[node], END
        if place != END and (token := self._text[place]) != END:
            self._total[node] = 1
            self._best[node] = token, self._leaf(node, token, place + 1)


class Reader:
    """Reads on from the end of one text among the contexts of `suffixes`, its own or another's, changing nothing.

    A place is a node, or ~i for the one occurrence that goes on at index i of the text.
    """

    def __init__(self, suffixes: Suffixes, places: list[int] | None = None) -> None:
        self._of = suffixes
        self.places = suffixes._ends if places is None else places

    def copy(self) -> Reader:
        return Reader(self._of, self.places)

    def best(self) -> tuple[int, int]:
        """(length of the longest context that something followed, what followed it most often); (0, END) for none."""
        for length in range(len(self.places) - 1, 0, -1):
            place = self.places[length]
            token = self._of._best[place][0] if place >= 0 else self._at(~place)
            if token != END:
                return length, token
        return 0, END

    def seen(self, token: int) -> list[tuple[int, int]]:
        """(how often `token` followed, how often anything did) for each context that the text ends with, shortest first."""
        of, seen = self._of, []
        for place in self.places:
            if place >= 0:
                child = of._child.get((place, token))
                seen.append((of._count[child] if child is not None else 0, of._total[place]))
            else:
                known = self._at(~place)
                seen.append((int(known == token), int(known != END)))
        return seen

    def read(self, token: int) -> None:
        """Go on with `token`."""
        of, places = self._of, [0]
        for place in self.places:
            if place >= 0:
                child = of._child.get((place, token))
                if child is None:
                    break  # longer contexts have not met it either
                places.append(child if of._goes_on[child] == END else ~of._goes_on[child])
            elif self._at(~place) == token:
                places.append(place - 1)  # ~(i + 1) == ~i - 1
            else:
                break
        self.places = places[: of.depth + 1]

    def _at(self, index: int) -> int:
        return self._of._text[index] if index < len(self._of._text) else END
