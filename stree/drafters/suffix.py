"""Drafting the continuations of suffixes that occurred before, in the text itself and in a datastore."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun
from stree.drafters.host_copies import AcceptedTokens, uploaded
from stree.growth import Growth
from stree.retrieval import LONGEST_MATCH, Datastore, Nodes, SuffixAutomaton, unite
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["SuffixDrafter"]


class SuffixDrafter(Drafter):
    """Draft what followed when the last tokens occurred before: in prompt or output, and in a store of other texts.

    No draft model, no random numbers: the tree holds the most frequent continuations of the longest suffixes that occur
    twice, best first, and all nodes are DELTA (SuffixDecoding, arXiv 2411.04975; REST, arXiv 2311.08252).  A growth is
    not used.

    Args:
        datastore: texts to draft from besides the request's own, or None.

    Raises:
        TypeError: a datastore that is not one, such as its path.
    """

    uses_growth = False

    def __init__(self, datastore: Datastore | None = None) -> None:
        if datastore is not None and not hasattr(datastore, "lay_out"):
            raise TypeError(f"datastore must be an object such as Datastore.load(path), got {datastore!r:.80}")
        self.datastore = datastore

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _SuffixRun:
        """Begin a run with a suffix automaton per prompt.

        Raises:
            ValueError: the datastore has more tokens than the target.
        """
        store = self.datastore
        if store is not None and store.vocab_size > vocab_size:  # a head may have more rows than there are tokens
            raise ValueError(
                f"datastore and target must share one vocabulary: the datastore has {store.vocab_size} tokens, "
                f"the target {vocab_size}"
            )
        return _SuffixRun(prompts, store)


class _SuffixRun(DraftRun):
    """Suffix automata of a batch, and the ends of its texts, on the host."""

    can_begin = can_select = can_extend = True

    def __init__(self, prompts: Sequence[Sequence[int]], store: Datastore | None) -> None:
        self._automata = [SuffixAutomaton(prompt) for prompt in prompts]
        self._ends = [list(prompt[-LONGEST_MATCH:]) for prompt in prompts]
        self._read_pending = [False] * len(prompts)  # whether a sequence's automaton has read its pending token
        self._store = store
        self._pending: list[int | None] = [None] * len(prompts)  # tokens; None where they were not read
        self._accepted: AcceptedTokens | None = None  # of the last step, where they were not read

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Append the pending tokens to the texts and lay out their continuations."""
        self._read_accepted()
        nodes = Nodes.empty(len(pending), budget - 1)
        size, forced = 1, self.forced() if self.forced is not None else [()] * len(pending)
        if None in self._pending:
            self._pending = pending.tolist()
        for row, token in enumerate(self._pending):
            assert token is not None, "all have been read"
            if not self._read_pending[row]:
                self._read(row, [token])
                self._read_pending[row] = True
            nodes.tokens[row, 0] = token
            size = max(size, self._lay_out(row, nodes.row(row), forced[row]))
        tokens, parents, values, depths = uploaded(nodes, size, pending)
        tree = TokenTree.unchecked(tokens, parents, depths)
        self.draft = Draft(tree, None, int(nodes.depths.max()), values=values)
        return self.draft

    def _lay_out(self, row: int, nodes: Nodes, forced: Sequence[int]) -> int:
        """Write the continuations found in a text and in the datastore to ``nodes``; return the tree's size.

        Tokens that are forced come first.
        """
        if forced:
            certain, found = Nodes.empty(len(forced)), Nodes.empty(len(nodes.tokens) - 1)
            certain.tokens[1:], certain.values[1:] = forced, 1
            certain.parents[1:], certain.depths[1:] = range(len(forced)), range(1, len(forced) + 1)
            return unite(certain, len(forced) + 1, found, self._lay_out(row, found, ()), nodes)
        if self._store is None:
            return self._automata[row].lay_out(nodes)
        own, stored = (Nodes.empty(len(nodes.tokens) - 1) for _ in range(2))
        sizes = self._automata[row].lay_out(own), self._store.lay_out(self._ends[row], stored)
        return unite(own, sizes[0], stored, sizes[1], nodes)

    def _read(self, row: int, tokens: list[int]) -> None:
        self._automata[row].extend(tokens)
        self._ends[row] = [*self._ends[row], *tokens][-LONGEST_MATCH:]

    def observe(self, acceptance: Acceptance) -> None:
        """Begin to copy the accepted tokens, which are appended to the texts before the next tree is laid out."""
        self._accepted = AcceptedTokens(self.draft.tree.tokens, acceptance)

    def _read_accepted(self) -> None:
        """Append the tokens accepted in the last step."""
        if self._accepted is None:
            return
        for row, tokens in enumerate(self._accepted.read()):
            if tokens:
                self._read(row, tokens[:-1])
                self._pending[row], self._read_pending[row] = tokens[-1], False
        self._accepted = None

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._read_accepted()
        for row, prompt in zip(rows, prompts, strict=True):
            self._pending[row] = None  # its first token is drawn from the prompt's logits
            self._automata[row], self._ends[row] = SuffixAutomaton(prompt), list(prompt[-LONGEST_MATCH:])
            self._read_pending[row] = False

    def select(self, rows: Tensor, rng: Random) -> _SuffixRun:
        self._read_accepted()
        other = _SuffixRun([], self._store)
        for row in rows.tolist():
            other._automata.append(self._automata[row])
            other._ends.append(self._ends[row])
            other._read_pending.append(self._read_pending[row])
            other._pending.append(self._pending[row])
        return other
