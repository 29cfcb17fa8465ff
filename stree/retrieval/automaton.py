"""A suffix automaton over one text that counts occurrences: the memory of the suffix drafter.

The construction is Blumer et al. (1985); drafting from it is SAM-Decoding (arXiv 2411.10666), and drafting by counts
SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from stree.retrieval.continuations import Continuations, Nodes

__all__ = ["SuffixAutomaton"]

FEWEST = 256  # tokens that there is room for at first
LARGEST_TOKEN = (1 << 31) - 1


class SuffixAutomaton:
    """All substrings of a text, each with its number of occurrences, extended token by token.

    A state stands for substrings that end at the same places.  Extending is amortised constant time: a token raises the
    counts of the 24 longest recurring suffixes, which are all of them unless the text repeats itself at length.

    Raises:
        ValueError: a token below 0, or above 2^31 - 1.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        # Imported with the first text: whoever does not retrieve need not wait for numba.
        from stree.retrieval import compiled_automaton as compiled

        self._compiled = compiled
        self._sizes = np.array([1, 0, 0, 0])
        self._states = np.array([[-1, 0, 0, -1, 0, -1]], dtype=np.int32)
        self._edges = np.empty((0, 4), dtype=np.int32)
        self._slots = np.empty(0, dtype=np.int32)
        self._frequent = np.empty((0, compiled.FREQUENT_COLUMNS), dtype=np.int32)
        self._num_tokens = self._room = 0
        self._reserve(FEWEST)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        new = np.asarray(tokens if isinstance(tokens, list | np.ndarray) else list(tokens), dtype=np.int64)
        if not new.size:
            return
        if new.min() < 0 or new.max() > LARGEST_TOKEN:
            raise ValueError(f"tokens must be in [0, {LARGEST_TOKEN}], got {int(new.min())} to {int(new.max())}")
        self._num_tokens += len(new)
        if self._num_tokens > self._room:
            self._reserve(max(self._num_tokens, 2 * self._room))
        self._compiled.extend(*self._arrays(), new)

    def count(self, tokens: Iterable[int]) -> int:
        """Count the occurrences of a token string in the text."""
        state = 0
        for token in tokens:
            edge = self._compiled.find(self._edges, self._slots, state, token)
            if edge < 0:
                return 0
            state = int(self._edges[edge, self._compiled.TARGET])
        return int(self._states[state, self._compiled.COUNT]) if state else 0

    def tree(self, max_nodes: int, min_match: int = 1, backoff: int = 3) -> Continuations:
        """Lay out the most frequent continuations of the text's longest suffixes that occurred before.

        Args:
            max_nodes: most nodes, the root not counted.
            min_match: shortest suffix that may predict.
            backoff: most suffixes consulted for one node.
        """
        nodes = Nodes.empty(max_nodes)
        return nodes.below_root(self.lay_out(nodes, min_match, backoff))

    def lay_out(self, nodes: Nodes, min_match: int = 1, backoff: int = 3) -> int:
        """Write the tree that ``tree`` gives, as large as there is room for; return its size, the root included."""
        return int(self._compiled.draft_own(*self._arrays(), *nodes, min_match, backoff))

    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Give what `stree.retrieval.compiled_automaton` calls an automaton."""
        return self._sizes, self._states, self._edges, self._slots, self._frequent

    def _reserve(self, tokens: int) -> None:
        """Make room for a text: at most two states and three edges a token (Blumer et al.)."""
        self._room = tokens
        self._states = _grown(self._states, 2 * tokens + 1)
        self._edges = _grown(self._edges, 3 * tokens)
        self._frequent = _grown(self._frequent, 3 * tokens // (self._compiled.MOST_CHILDREN + 1) + 1)
        self._slots = np.full(1 << (6 * tokens - 1).bit_length(), -1, dtype=np.int32)  # at most half full
        self._compiled.rebuild_slots(self._sizes, self._edges, self._slots)


def _grown(rows: np.ndarray, size: int) -> np.ndarray:
    """Copy rows into a larger array; pages that are never written to take no memory."""
    larger = np.empty((size, rows.shape[1]), dtype=rows.dtype)
    larger[: len(rows)] = rows
    return larger
