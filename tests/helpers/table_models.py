"""Toy language models, the logits of whose next token are a row of a table, and draft trees of growths on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, cast

import torch
from torch import Tensor

from helpers.outcomes import random_rows
from stree.drafters import Draft, ModelDrafter
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree


@dataclass(frozen=True, slots=True, eq=False)
class TableModel:
    """A toy language model: the last token selects a row of float64[vocab, vocab] logits."""

    logits: Tensor

    @classmethod
    def random(cls, vocab: int, seed: int, scale: float = 1.5) -> Self:
        generator = torch.Generator().manual_seed(seed)
        return cls(scale * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64))

    @property
    def vocab(self) -> int:
        return self.logits.shape[0]

    def joint(self, sampling: Sampling, length: int) -> Tensor:
        """Distribution of the ``length`` tokens after a root of token 0: float64[vocab ** length]."""
        joint = torch.ones(1, dtype=torch.float64)
        for _ in range(length):
            joint = self.continued(joint, sampling)
        return joint

    def continued(self, joint: Tensor, sampling: Sampling) -> Tensor:
        """Distribution of texts after a root of token 0 with one token more: float64[vocab ** (length + 1)]."""
        last = torch.arange(joint.numel()) % self.vocab
        return (joint[:, None] * sampling.probs(self.logits)[last]).flatten()


@dataclass(slots=True, eq=False)
class TableState:
    """Lengths of the texts of a ``TableLM``."""

    lengths: Tensor
    max_length: int
    max_nodes: int
    length_bound: int = 0
    fixed_shapes: bool = False
    pending_tree: TokenTree | None = None

    def resized(self, max_length: int, max_nodes: int) -> TableState:
        return TableState(self.lengths, max_length, max_nodes, self.length_bound)

    def select(self, rows: Tensor) -> TableState:
        return TableState(self.lengths[rows], self.max_length, self.max_nodes, self.length_bound)

    def reset_rows(self, rows: list[int]) -> None:
        self.lengths[rows] = 0

    def reset(self) -> None:
        self.lengths, self.length_bound = torch.zeros_like(self.lengths), 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class TableLM:
    """A ``TreeLM`` whose model is a table.

    Attributes:
        table: the toy model.
        num_calls: number of forward passes over trees.
    """

    table: TableModel
    num_calls: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float64
    max_length: None = None

    @property
    def vocab_size(self) -> int:
        return self.table.vocab

    def agreed(self, measured: float) -> float:
        return measured

    def new_state(self, batch_size: int, max_length: int, max_nodes: int) -> TableState:
        return TableState(torch.zeros(batch_size, dtype=torch.int32), max_length, max_nodes)

    def prefill(self, state: TableState, input_ids: Tensor, lengths: Tensor) -> Tensor:
        state.lengths = lengths.to(torch.int32)
        state.length_bound = int(lengths.max())
        return self.table.logits[input_ids.gather(1, lengths[:, None].long() - 1).squeeze(1)]

    def prefill_row(self, state: TableState, row: int, input_ids: Tensor) -> Tensor:
        state.lengths[row] = input_ids.shape[1]
        state.length_bound = int(state.lengths.max())
        return self.table.logits[input_ids[:, -1]]

    def verify(self, state: TableState, tree: TokenTree, first: int = 0) -> Tensor:
        self.num_calls += 1
        return self.table.logits[tree.tokens[:, first:]]

    def commit(self, state: TableState, path: Tensor, path_lengths: Tensor) -> None:
        state.lengths = state.lengths + path_lengths
        state.length_bound = int(state.lengths.max())

    def as_lm(self) -> TreeLM:
        """Cast to the class that it replaces."""
        return cast(TreeLM, self)


GREEDY = Sampling()


def table_drafter(dist: TableModel) -> ModelDrafter:
    """Draft with a table instead of a model."""
    return ModelDrafter(TableLM(dist).as_lm())


def draft_of(dist: TableModel, growth: Growth, budget: int, sampling: Sampling, rng: Random, batch: int = 1) -> Draft:
    """Propose trees below pending tokens 0 of one-token texts."""
    run = table_drafter(dist).start(dist.vocab, [[0]] * batch, rng)
    return run.propose(torch.zeros(batch, dtype=torch.long), growth.bind(sampling), budget)


def nodes_by_path(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """List the token path below the root of every node that is not padding."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
    return [path for node, path in paths.items() if node]


def path_prob(dist: TableModel, path: Sequence[int]) -> float:
    prob, last = 1.0, 0
    for token in path:
        prob *= float(dist.logits[last].softmax(-1)[token])
        last = token
    return prob


def counted_draft(
    dist: TableModel, growth: Growth, budget: int, sampling: Sampling = GREEDY, batch: int = 1, first: int = 0
) -> tuple[Draft, int]:
    """Propose below pending tokens first, first + 1, ...; return the draft and the draft calls really made."""
    lm = TableLM(dist)
    run = ModelDrafter(lm.as_lm()).start(dist.vocab, [[0]] * batch, random_rows(batch))
    pending = (torch.arange(batch) + first) % dist.vocab
    draft = run.propose(pending, growth.bind(sampling), budget)
    assert draft.num_calls == lm.num_calls
    return draft, lm.num_calls
