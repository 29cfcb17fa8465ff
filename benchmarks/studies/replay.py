"""Fixed texts on which every way of drafting is compared: remembered forwards, shared draws, exact expectations.

A model's forwards on one context are remembered by token path, and a draft's draws are numbered by the path of the
node above them.  So all growths choose from one random tree a context, and what differs between two of them
is what they chose, not what was drawn.  It is independent of suites and growths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stree.drafters import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import MAX_RANKS, Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["Coupled", "Replay", "Walked"]


@dataclass(slots=True)
class _Known:
    """Nodes of one context that were seen, by parent and token, and where their logits are kept.

    Attributes:
        children: number of each node by (number of its parent, token); the root is 0.
        above: number of each node's parent; tokens: its token; mark: a hash of its path.
        place: row of each node's logits, -1 if it was not run.
    """

    children: dict[tuple[int, int], int] = field(default_factory=dict)
    above: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=lambda: [0])
    mark: list[int] = field(default_factory=lambda: [1])
    place: list[int] = field(default_factory=lambda: [-1])

    def child(self, parent: int, token: int) -> int:
        """Number a node; a new one gets the next number."""
        number = self.children.setdefault((parent, token), len(self.above))
        if number == len(self.above):
            self.above.append(parent)
            self.tokens.append(token)
            self.mark.append((self.mark[parent] * 1000003 + token + 1) & 0x7FFFFFFF)
            self.place.append(-1)
        return number

    def marks(self, nodes: list[int]) -> list[int]:
        """Marks of nodes; a token drawn twice with replacement gives two nodes with different marks."""
        seen: dict[int, int] = {}
        found = []
        for node in nodes:
            seen[node] = times = seen.get(node, -1) + 1
            found.append((self.mark[node] + 7919 * times) & 0x7FFFFFFF)
        return found


@dataclass(slots=True, eq=False)
class _Place:
    """State that a drafter sees of a replay: the lengths of the texts, and room for any tree."""

    replay: Replay
    max_length: int = 1 << 30
    max_nodes: int = 1 << 30
    length_bound: int = 0
    fixed_shapes: bool = False
    pending_tree: TokenTree | None = None

    @property
    def lengths(self) -> Tensor:
        """Tokens that every text has had before the pending one: int32[batch]."""
        return self.replay.lengths


class Replay:
    """Replaces a ``TreeLM`` on fixed texts: runs only nodes that it has not run before, and commits nothing.

    Args:
        lm: the model.
        prompts: the texts' beginnings.
        max_new_tokens: most tokens that they go on by.
    """

    def __init__(self, lm: TreeLM, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        self._lm, self.device, self.vocab_size, self.max_length = lm, lm.device, lm.vocab_size, lm.max_length
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        self._state = lm.new_state(len(prompts), width + max_new_tokens, 512)
        lm.prefill(self._state, ids, lengths)
        self._logits = torch.zeros(len(prompts), 0, self.vocab_size)
        self._known: list[_Known] = []
        self._used = 0  # places of the logits taken
        self._columns: list[list[int]] = []  # of each text, the nodes of the last tree
        self._forget()

    @property
    def lengths(self) -> Tensor:
        """Tokens before the pending ones: int32[batch]."""
        return self._state.lengths

    def move(self, tokens: Tensor) -> None:
        """Commit int64[batch, m] further tokens of the texts, the pending ones first."""
        batch, m = tokens.shape
        self._lm.verify(self._state, TokenTree.chain(tokens))
        path = torch.arange(m, dtype=torch.int32).expand(batch, -1)
        self._lm.commit(self._state, path, torch.full((batch,), m, dtype=torch.int32))
        self._forget()

    def new_state(self, batch_size: int, max_length: int, max_nodes: int) -> _Place:
        """State that shows a drafter the lengths of the texts."""
        return _Place(self)

    def prefill(self, state: _Place, input_ids: Tensor, lengths: Tensor) -> None:
        """Has no effect, since the texts are fixed."""

    def commit(self, state: _Place, path: Tensor, path_lengths: Tensor) -> None:
        """Has no effect, since the texts are fixed."""

    def verify(self, state: _Place | None, tree: TokenTree, first: int = 0) -> Tensor:
        """Logits of nodes first, first + 1, ...: float[batch, n - first, vocab]."""
        if not first:
            self._columns = [[] for _ in self._known]
        tokens, parents = tree.tokens[:, first:].tolist(), tree.parents[:, first:].tolist()
        for row, known in enumerate(self._known):
            columns = self._columns[row]
            del columns[first:]
            for token, parent in zip(tokens[row], parents[row], strict=True):
                if not columns:
                    known.tokens[0] = token
                columns.append(known.child(columns[parent], token) if parent >= 0 else 0)  # padding may show anything
        self._run([columns[first:] for columns in self._columns])
        asked = [(known, columns[first:]) for known, columns in zip(self._known, self._columns, strict=True)]
        places = torch.tensor([[known.place[node] for node in columns] for known, columns in asked])
        self.marks = torch.tensor([known.marks(columns) for known, columns in asked])
        return self._logits[torch.arange(len(places))[:, None], places]

    def _run(self, wanted: list[list[int]]) -> None:
        """Run the nodes that were not run yet, below the ancestors that lead to them."""
        trees = [self._missing(known, nodes) for known, nodes in zip(self._known, wanted, strict=True)]
        if not any(new for _, new in trees):
            return
        n = max(len(nodes) for nodes, _ in trees)
        tokens, parents = torch.zeros(len(trees), n).long(), torch.full((len(trees), n), -1, dtype=torch.int32)
        for row, (nodes, _) in enumerate(trees):
            column = {node: index for index, node in enumerate(nodes)}
            known = self._known[row]
            tokens[row, : len(nodes)] = torch.tensor([known.tokens[node] for node in nodes])
            above = [column.get(known.above[node], -1) for node in nodes]
            parents[row, : len(nodes)] = torch.tensor(above, dtype=torch.int32)
        if n > self._state.max_nodes:
            self._state = self._state.resized(self._state.max_length, n)
        logits = self._lm.verify(self._state, TokenTree.unchecked(tokens, parents))
        self._remember([new for _, new in trees], [nodes for nodes, _ in trees], logits)

    def _missing(self, known: _Known, wanted: list[int]) -> tuple[list[int], list[int]]:
        """List the nodes to run and, of them, those whose logits are new; parents have lower numbers."""
        new = sorted({node for node in wanted if known.place[node] < 0})
        nodes = {0}
        for node in new:
            while node not in nodes:
                nodes.add(node)
                node = known.above[node]
        return sorted(nodes), new

    def _remember(self, new: list[list[int]], nodes: list[list[int]], logits: Tensor) -> None:
        """Keep the logits of new nodes."""
        most = self._used + max(map(len, new))
        if most > self._logits.shape[1]:
            more = logits.new_zeros(len(new), max(most, 256), self.vocab_size)
            self._logits = torch.cat([self._logits.to(more), more], 1)
        for row, known in enumerate(self._known):
            if new[row]:
                columns = [nodes[row].index(node) for node in new[row]]
                self._logits[row, self._used : self._used + len(columns)] = logits[row, columns]
                for place, node in enumerate(new[row], self._used):
                    known.place[node] = place
        self._used = most

    def _forget(self) -> None:
        """Begin a new context and reuse the memory of the last one's logits."""
        batch = len(self._state.lengths)
        self._known = [_Known() for _ in range(batch)]
        self._used = 0


@dataclass(frozen=True, slots=True, eq=False)
class Coupled(Random):
    """Random numbers whose draft draws are numbered by token path, so that all trees draw alike below equal nodes.

    Below a node the draws of one tree have different numbers, as ``Random`` gives them, so each tree has its own
    distribution; only trees of different growths depend on each other.

    Attributes:
        replay: the draft model, which holds the paths of the nodes that it ran last.
    """

    replay: Replay

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw by inversion, as ``Random`` does."""
        if purpose == "draft" and isinstance(node, Tensor) and node.shape[1] <= self.replay.marks.shape[1]:
            node = (self.replay.marks[:, : node.shape[1]] * 31 + node % MAX_RANKS) & 0x7FFFFFFF
        return Random.choice(self, purpose, probs, offset, node)


class Walked(Drafter):
    """A drafter without a model on fixed texts: it observes every token of the text, whatever was proposed.

    Args:
        drafter: such as ``SuffixDrafter``.
        texts: int64[batch, m], the tokens after the prompts.
        stride: tokens of the texts that every step reads.
    """

    def __init__(self, drafter: Drafter, texts: Tensor, stride: int) -> None:
        self._drafter, self._texts, self._stride = drafter, texts, stride

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _WalkedRun:
        """Begin a run."""
        return _WalkedRun(self._drafter.start(vocab_size, prompts, rng), self._texts, self._stride)


class _WalkedRun(DraftRun):
    """Run of a ``Walked`` drafter."""

    can_extend = True

    def __init__(self, run: DraftRun, texts: Tensor, stride: int) -> None:
        self._run, self._texts, self._stride, self._step = run, texts, stride, 0

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Propose as the drafter does."""
        return self._run.propose(pending, growth, budget)

    def observe(self, acceptance: Acceptance) -> None:
        """Read the next tokens of the texts, whatever was accepted."""
        begin, m = self._step * self._stride, self._stride
        tree = TokenTree.chain(self._texts[:, begin : begin + m])
        self._run.draft = replace(self._run.draft, tree=tree, column=torch.full_like(tree.tokens, -1), is_united=True)
        batch = len(self._texts)
        path = torch.arange(m, dtype=torch.int32).expand(batch, -1)
        following = self._texts[:, begin + m]
        self._run.observe(Acceptance(path, torch.full((batch,), m, dtype=torch.int32), following))
        self._step += 1
