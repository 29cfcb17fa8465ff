"""Drafting from the text's own repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stree.drafters.protocol import Draft
from stree.growth import Growth
from stree.sampling import Random
from stree.suffix import SuffixAutomaton
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["SuffixDrafter"]


class SuffixDrafter:
    """Draft what followed when the last tokens occurred before, in prompt or output (SuffixDecoding, arXiv 2411.04975).

    No draft model, no random numbers: the tree holds the most frequent continuations of the longest suffixes that occur
    twice, best first, and all nodes are DELTA.  A growth is not used.

    Args:
        datastore: continuations from elsewhere; not supported yet, None.
        min_match: shortest suffix that may predict.

    Raises:
        NotImplementedError: a datastore is given.
    """

    def __init__(self, datastore: Any = None, *, min_match: int = 1) -> None:
        if datastore is not None:
            raise NotImplementedError("SuffixDrafter does not support a datastore yet; pass None")
        self.min_match = min_match

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _SuffixRun:
        """Begin a run with an automaton a prompt."""
        return _SuffixRun(prompts, self.min_match)


class _SuffixRun:
    """Automata of a batch, kept on the host."""

    def __init__(self, prompts: Sequence[Sequence[int]], min_match: int) -> None:
        self._automata = [SuffixAutomaton(prompt) for prompt in prompts]
        self._known = [-1] * len(prompts)  # the pending token that a sequence's automaton has read already
        self._min_match = min_match
        self._tree: TokenTree | None = None

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Append the pending tokens to the texts and lay out their continuations."""
        trees = []
        for row, token in enumerate(pending.tolist()):
            if self._known[row] < 0:
                self._automata[row].extend([token])
                self._known[row] = token
            below, above = self._automata[row].tree(budget - 1, self._min_match)
            trees.append(([token, *below], [-1, *above]))
        n, deepest = max(len(tokens) for tokens, _ in trees), 0
        for tokens, parents in trees:
            depths = [0]
            for parent in parents[1:]:
                depths.append(depths[parent] + 1)
            deepest = max(deepest, *depths)
            tokens += [0] * (n - len(tokens))
            parents += [-1] * (n - len(parents))
        columns = torch.tensor(trees, device=pending.device)  # [batch, 2, n]
        self._tree = TokenTree.unchecked(columns[:, 0], columns[:, 1].to(torch.int32))
        return Draft(self._tree, None, deepest)

    def observe(self, acceptance: Acceptance) -> None:
        """Append the accepted tokens."""
        assert self._tree is not None, "observe follows propose"
        accepted = self._tree.tokens.gather(1, acceptance.path.clamp(min=0).long()).tolist()
        for row, length in enumerate(acceptance.path_lengths.tolist()):
            if length:
                self._automata[row].extend(accepted[row][1:length])
                self._known[row] = -1
