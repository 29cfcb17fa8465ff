"""Toy language models, the logits of whose next token are a row of a table: small enough to enumerate every text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, cast

import torch
from torch import Tensor

from stree.drafters import ModelDrafter
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.tree import TokenTree

__all__ = ["PAIRS", "Pair", "TableLM", "TableModel", "adversarial_pair", "exact_probs", "random_pair", "table_drafter"]


def exact_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return float64[..., vocab] probabilities after temperature, top-k, top-p and min-p, in plain Python."""
    rows = [_exact_row(row, sampling) for row in logits.reshape(-1, logits.shape[-1]).tolist()]
    return torch.tensor(rows, dtype=torch.float64).view(logits.shape)


def _exact_row(logits: list[float], sampling: Sampling) -> list[float]:
    best = max(logits)
    if sampling.temperature == 0:
        return [float(token == logits.index(best)) for token in range(len(logits))]
    weights = [math.exp((logit - best) / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.top_k is not None:
        least = logits[order[min(sampling.top_k, len(order)) - 1]]
        order = [token for token in order if logits[token] >= least]
    if sampling.top_p is not None and sampling.top_p < 1:
        level, reached, kept = sampling.top_p * math.fsum(weights[token] for token in order), 0.0, list[int]()
        for token in order:
            if reached < level:
                kept.append(token)
            reached += weights[token]
        order = kept
    if sampling.min_p is not None:
        order = [token for token in order if weights[token] >= sampling.min_p]
    total = math.fsum(weights[token] for token in order)
    return [weights[token] / total if token in order else 0.0 for token in range(len(logits))]


@dataclass(frozen=True, slots=True, eq=False)
class TableModel:
    """A toy language model: the last token selects a row of float64[vocab, vocab] logits."""

    logits: Tensor

    @classmethod
    def random(cls, vocab: int, seed: int, scale: float = 1.5) -> Self:
        """Draw a table; the same arguments give the same one."""
        generator = torch.Generator().manual_seed(seed)
        return cls(scale * torch.randn(vocab, vocab, generator=generator, dtype=torch.float64))

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.logits.shape[0]

    def joint(self, sampling: Sampling, length: int, root: int = 0) -> Tensor:
        """Distribution of the ``length`` tokens after a root: float64[vocab ** length]."""
        joint = torch.ones(1, dtype=torch.float64)
        for _ in range(length):
            joint = self.continued(joint, sampling, root)
        return joint

    def continued(self, joint: Tensor, sampling: Sampling, root: int = 0) -> Tensor:
        """Distribution of the texts after a root with one token more: float64[vocab ** (length + 1)]."""
        last = torch.arange(joint.numel()) % self.vocab if joint.numel() > 1 else torch.tensor([root])
        return (joint[:, None] * exact_probs(self.logits, sampling)[last]).flatten()


Pair = tuple[TableModel, TableModel]  # a target and a draft model


def random_pair(vocab: int, seed: int) -> Pair:
    """Return a random target and a draft model that has nothing to do with it."""
    return TableModel.random(vocab, seed), TableModel.random(vocab, 100 + seed)


def adversarial_pair(vocab: int, seed: int) -> Pair:
    """Return a target and an adversarial draft model, of one of six kinds."""
    target, other = random_pair(vocab, seed)
    logits, token = target.logits, torch.arange(vocab)
    if seed % 6 == 0:  # likely tokens are unlikely
        return target, TableModel(-2 * logits)
    if seed % 6 == 1:  # no drafted token has a probability above 0
        half = token % 2 == seed // 6 % 2
        return TableModel(logits.masked_fill(half, -torch.inf)), TableModel(other.logits.masked_fill(~half, -torch.inf))
    if seed % 6 == 2:  # both nearly one-hot, at different tokens
        return TableModel(12 * logits), TableModel(12 * other.logits)
    if seed % 6 == 3:  # the same distribution
        return target, TableModel(logits.clone())
    if seed % 6 == 4:  # a one-hot draft of a uniform target
        one_hot = torch.where(token == seed // 6, 0.0, -torch.inf)
        return TableModel(torch.zeros_like(logits)), TableModel(one_hot.double().repeat(vocab, 1))
    is_best = logits == logits.amax(1, True)  # the draft's top candidate is impossible
    return TableModel(logits.masked_fill(is_best, -torch.inf)), target


PAIRS: dict[str, Callable[[int, int], Pair]] = {"random": random_pair, "adversarial": adversarial_pair}


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
        """Return a state with room for longer texts and larger trees."""
        return TableState(self.lengths, max_length, max_nodes, self.length_bound)

    def select(self, rows: Tensor) -> TableState:
        """Return the state of some rows."""
        return TableState(self.lengths[rows], self.max_length, self.max_nodes, self.length_bound)

    def reset_rows(self, rows: list[int]) -> None:
        """Empty some rows."""
        self.lengths[rows] = 0

    def reset(self) -> None:
        """Empty all rows."""
        self.lengths, self.length_bound = torch.zeros_like(self.lengths), 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class TableLM:
    """What ``generate`` and ``ModelDrafter`` use of a ``TreeLM``, with a table in place of a model.

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
        """Size of the vocabulary."""
        return self.table.vocab

    def agreed(self, measured: float) -> float:
        """Return a time as it was measured: there are no other processes."""
        return measured

    def new_state(self, batch_size: int, max_length: int, max_nodes: int) -> TableState:
        """Return an empty state."""
        return TableState(torch.zeros(batch_size, dtype=torch.int32), max_length, max_nodes)

    def prefill(self, state: TableState, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Read prompts; return the logits of the tokens after them."""
        state.lengths = lengths.to(torch.int32)
        state.length_bound = int(lengths.max())
        return self.table.logits[input_ids.gather(1, lengths[:, None].long() - 1).squeeze(1)]

    def prefill_row(self, state: TableState, row: int, input_ids: Tensor) -> Tensor:
        """Read the prompt of one row."""
        state.lengths[row] = input_ids.shape[1]
        state.length_bound = int(state.lengths.max())
        return self.table.logits[input_ids[:, -1]]

    def verify(self, state: TableState, tree: TokenTree, first: int = 0) -> Tensor:
        """Return the logits at the nodes of trees from ``first`` on."""
        self.num_calls += 1
        return self.table.logits[tree.tokens[:, first:]]

    def commit(self, state: TableState, path: Tensor, path_lengths: Tensor) -> None:
        """Append accepted paths to the texts."""
        state.lengths = state.lengths + path_lengths
        state.length_bound = int(state.lengths.max())

    def as_lm(self) -> TreeLM:
        """Cast to the class that it replaces."""
        return cast(TreeLM, self)


def table_drafter(table: TableModel) -> ModelDrafter:
    """Return a drafter with a table in place of a model."""
    if not isinstance(table, TableModel):
        raise TypeError(f"table must be a TableModel, got {table!r:.80}")
    return ModelDrafter(TableLM(table).as_lm())
