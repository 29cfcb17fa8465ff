"""A suffix automaton over one text that counts occurrences: the memory of the suffix drafter.

The construction is Blumer et al. (1985); drafting from it is SAM-Decoding (arXiv 2411.10666), and drafting by counts
SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable

from stree.retrieval.continuations import Candidate, Continuations, best_first

__all__ = ["SuffixAutomaton"]

MOST_CHILDREN = 8  # continuations of one string that are considered
MOST_COUNTED = 24  # suffixes whose counts a token raises
LARGE = 32  # a state with more continuations keeps a list of its most frequent ones


class SuffixAutomaton:
    """All substrings of a text, each with its number of occurrences, extended token by token.

    A state stands for substrings that end at the same places.  Extending is amortised constant time: a token raises the
    counts of the 24 longest recurring suffixes, which are all of them unless the text repeats itself at length.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = 0
        self._frequent: dict[int, tuple[int, int, list[tuple[int, int, int]]]] = {}
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

    def tree(self, max_nodes: int, min_match: int = 1, backoff: int = 3) -> Continuations:
        """Lay out the most frequent continuations of the text's longest suffixes that occurred before.

        A node's value is its parent's times an estimate of the next token's probability: its count after the longest
        match, then after shorter ones by the escape rule of PPM-A (Cleary and Witten, 1984).

        Args:
            max_nodes: most nodes, the root not counted.
            min_match: shortest suffix that may predict.
            backoff: most suffixes consulted for one node.
        """

        def expand(value: float, state: int) -> list[Candidate[int]]:
            return self._predict(state, value, min_match, backoff)

        return best_first(expand(1.0, self._link[self._last]), expand, max_nodes)

    def _predict(self, state: int, value: float, min_match: int, backoff: int) -> list[Candidate[int]]:
        """List (value, token, state) of what may follow the strings of a state, the longest match's first."""
        found: dict[int, Candidate[int]] = {}
        while state > 0 and backoff and self._length[state] >= min_match:
            total, after = self._followers(state)
            value /= total
            for count, token, target in after:
                if token not in found:
                    found[token] = (value * count, token, target)
            state, backoff = self._link[state], backoff - 1
        return list(found.values())

    def _followers(self, state: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Give 1 + the number of continuations of a state, and the most frequent as (count, token, state).

        Those of a state with many are looked up anew only after it has occurred an eighth more often.
        """
        following, count = self._next[state], self._count
        if len(following) == 1:
            ((token, target),) = following.items()
            return 1 + count[target], [(count[target], token, target)]
        known = self._frequent.get(state)
        if known is not None and count[state] - known[0] <= known[0] // 8:
            return known[1], known[2]
        after = sorted([(count[target], token, target) for token, target in following.items()], reverse=True)
        total = 1 + sum([found[0] for found in after])
        if len(after) > LARGE:
            self._frequent[state] = (count[state], total, after[:MOST_CHILDREN])
        return total, after[:MOST_CHILDREN]

    def _append(self, token: int) -> None:
        """Append one token (the online construction), then count its place for the suffixes of the text."""
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
        for _ in range(MOST_COUNTED):
            if state <= 0:
                break
            self._count[state] += 1
            state = self._link[state]

    def _add(self, transitions: dict[int, int], length: int, count: int) -> int:
        """Make a state."""
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1
