"""A suffix automaton over one text that counts occurrences: the memory of the suffix drafter.

It knows tokens only.  The construction is Blumer et al. (1985); drafting from it is SAM-Decoding (arXiv 2411.10666),
and drafting by counts SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

__all__ = ["SuffixAutomaton"]


class SuffixAutomaton:
    """All substrings of a text, each with its number of occurrences, extended token by token.

    A state stands for substrings that end at the same places.  Extending is amortised constant time for the states; the
    counts walk the suffix links of the text read so far, which is short unless the text repeats itself.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def count(self, tokens: Iterable[int]) -> int:
        """Count the occurrences of a token string in the text."""
        state = 0
        for token in tokens:
            if token not in self._next[state]:
                return 0
            state = self._next[state][token]
        return self._count[state] if state else 0

    def tree(self, max_nodes: int, min_match: int = 1, backoff: int = 3) -> tuple[list[int], list[int]]:
        """Lay out the most frequent continuations of the text's longest suffixes that occurred before.

        A node's value is its parent's times an estimate of the next token's probability: its count after the longest
        match, then after shorter ones by the escape rule of PPM-A (Cleary and Witten, 1984).  Nodes are taken best
        first.

        Args:
            max_nodes: most nodes, the root not counted.
            min_match: shortest suffix that may predict.
            backoff: most suffixes consulted for one node.

        Returns:
            tokens and parents of the nodes below the root; parent 0 is the root, parent i the i-th node.
        """
        tokens: list[int] = []
        parents: list[int] = []
        heap = [
            (-value, 0, token, state)
            for value, token, state in self._predict(self._link[self._last], 1.0, min_match, backoff)
        ]
        heapq.heapify(heap)
        while heap and len(tokens) < max_nodes:
            negative, parent, token, state = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            for value, following, target in self._predict(state, -negative, min_match, backoff):
                heapq.heappush(heap, (-value, len(tokens), following, target))
        return tokens, parents

    def _predict(self, state: int, value: float, min_match: int, backoff: int) -> list[tuple[float, int, int]]:
        """List (value, token, state) of what may follow the strings of a state, most probable first, 8 a suffix."""
        found: list[tuple[float, int, int]] = []
        seen: set[int] = set()
        while state > 0 and backoff and self._length[state] >= min_match:
            after = [(self._count[target], token, target) for token, target in self._next[state].items()]
            total = 1 + sum(count for count, _, _ in after)
            for count, token, target in heapq.nlargest(8, after):
                if token not in seen:
                    seen.add(token)
                    found.append((value * count / total, token, target))
            value, state, backoff = value / total, self._link[state], backoff - 1
        return found

    def _append(self, token: int) -> None:
        """Append one token (the online construction), then count its place for every suffix of the text."""
        new = self._add({}, self._length[self._last] + 1, 0)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state == -1:
            self._link[new] = 0
        else:
            target = self._next[state][token]
            if self._length[target] != self._length[state] + 1:
                clone = self._add(dict(self._next[target]), self._length[state] + 1, self._count[target])
                self._link[clone] = self._link[target]
                while state != -1 and self._next[state].get(token) == target:
                    self._next[state][token] = clone
                    state = self._link[state]
                self._link[target] = clone
                target = clone
            self._link[new] = target
        self._last = state = new
        while state > 0:
            self._count[state] += 1
            state = self._link[state]

    def _add(self, transitions: dict[int, int], length: int, count: int) -> int:
        """Make a state."""
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1
