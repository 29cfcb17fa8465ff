"""A suffix automaton over one text that counts occurrences (Blumer et al., 1985).

Drafting from a suffix automaton is SAM-Decoding (arXiv 2411.10666), ranking drafts by counts SuffixDecoding (arXiv
2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from stree.retrieval.continuations import Nodes

__all__ = ["SuffixAutomaton"]

INITIAL_TOKENS = 256  # capacity at first
LARGEST_TOKEN = (1 << 31) - 1


class SuffixAutomaton:
    """All substrings of a text, each with its number of occurrences, extended token by token.

    A state represents the substrings that end at the same positions. Extending takes amortised constant time: a token
    updates the counts of the 24 longest suffixes that occurred before, which are all of them in most texts.

    Raises:
        ValueError: a token below 0, or above 2^31 - 1.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        from stree.retrieval import numba_automaton  # imports numba, which takes part of a second

        self._numba = numba_automaton
        self._sizes = np.array([1, 0, 0, 0])
        self._states = np.array([[-1, 0, 0, -1, 0, -1]], dtype=np.int32)
        self._edges = np.empty((0, 4), dtype=np.int32)
        self._slots = np.empty(0, dtype=np.int32)
        self._frequent = np.empty((0, numba_automaton.FREQUENT_COLUMNS), dtype=np.int32)
        self._num_tokens = self._capacity = 0
        self._reserve(INITIAL_TOKENS)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        try:
            new = np.asarray(tokens if isinstance(tokens, list | np.ndarray) else list(tokens), dtype=np.int64).ravel()
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(f"tokens must be a list of integers, got {tokens!r:.80}") from None
        if not new.size:
            return
        if new.min() < 0 or new.max() > LARGEST_TOKEN:
            raise ValueError(f"tokens must be in [0, {LARGEST_TOKEN}], got {int(new.min())} to {int(new.max())}")
        self._num_tokens += len(new)
        if self._num_tokens > self._capacity:
            self._reserve(max(self._num_tokens, 2 * self._capacity))
        self._numba.extend(self._arrays(), new)

    def count(self, tokens: Iterable[int]) -> int:
        """Count the occurrences of a token string in the text."""
        state = 0
        for token in tokens:
            edge = self._numba.find(self._edges, self._slots, state, token)
            if edge < 0:
                return 0
            state = int(self._edges[edge, self._numba.TARGET])
        return int(self._states[state, self._numba.COUNT]) if state else 0

    def lay_out(self, nodes: Nodes, min_match: int = 1, backoff: int = 3) -> int:
        """Write the most frequent continuations of the text's longest suffixes that occurred before.

        Args:
            nodes: is filled, as far as there are continuations.
            min_match: shortest suffix that may predict.
            backoff: largest number of suffixes used for one node.

        Returns:
            The number of nodes, the root included.
        """
        return int(self._numba.draft_from_automaton(self._arrays(), nodes, min_match, backoff))

    def _arrays(self) -> Any:
        """The arrays that the compiled code takes."""
        return self._numba.Automaton(self._sizes, self._states, self._edges, self._slots, self._frequent)

    def _reserve(self, tokens: int) -> None:
        """Allocate for a text of so many tokens: at most two states and three edges a token (Blumer et al.)."""
        self._capacity = tokens
        self._states = _grown(self._states, 2 * tokens + 1)
        self._edges = _grown(self._edges, 3 * tokens)
        self._frequent = _grown(self._frequent, 3 * tokens // (self._numba.MOST_CHILDREN + 1) + 1)
        self._slots = np.full(1 << (6 * tokens - 1).bit_length(), -1, dtype=np.int32)  # at most half full
        self._numba.rebuild_slots(self._sizes, self._edges, self._slots)


def _grown(rows: np.ndarray, size: int) -> np.ndarray:
    """Copy rows into a larger array; pages that are never written use no memory."""
    larger = np.empty((size, rows.shape[1]), dtype=rows.dtype)
    larger[: len(rows)] = rows
    return larger
