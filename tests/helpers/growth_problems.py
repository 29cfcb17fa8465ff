"""Values, distributions, tables and layers for the tests of one layer of growth, in Triton and compiled for the CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from stree.drafters.candidates import Candidates
from stree.drafters.tree_builder import GrownTree
from stree.growth import Layer, Plan
from stree.growth.calibrated import typical_values
from stree.growth.learned_acceptance import GreedyAcceptance, SampledAcceptance
from stree.kernels.step.texts import Seen
from stree.kernels.tree_growth.operands import Children, Level, Memory, RankFit, Table, Words
from stree.kernels.tree_growth.reference import remember

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ("random", "ties", "zeros", "few", "tiny")
SIZES = [(1, 1, 4), (3, 1, 1), (2, 1, 12), (1, 15, 4), (3, 36, 6), (1, 63, 6)]  # batch, nodes above, ranks
LAYERS = {  # plans whose layers hold leaves, padding and nodes that cannot be proposed any more
    "drawn": Plan((Layer(4, 4), Layer(9, 4, leaves=3), Layer(5, 3, leaves=2), Layer(7, 2)), 15),
    "pruned": Plan((Layer(4, 4), Layer(6, 3), Layer(6, 3), Layer(6, 2)), 9, is_pruned=True),
    "pruned wide": Plan((Layer(8, 8), Layer(66, 9), Layer(4, 2)), 40, is_pruned=True),
    "wide": Plan((Layer(12, 12), Layer(63, 6), Layer(63, 6), Layer(63, 6)), 63),
    "one": Plan((Layer(1, 1), Layer(1, 1)), 2),
}


def some_values(kind: str, batch: int, slots: int, seed: int, device: torch.device = DEVICE) -> Tensor:
    """Draw float32[batch, slots] of values that are hard to order."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.rand(batch, slots, generator=generator)
    if kind == "ties":
        value = (value * 3).round() / 3
    elif kind == "zeros":
        value = value * 0
    elif kind == "few":
        value = value * (torch.rand(batch, slots, generator=generator) < 0.2)
    elif kind == "tiny":
        value = value * 10 ** -(40 * torch.rand(batch, slots, generator=generator))
    return value.to(device)


def relative_values(nodes: int, depth: int, device: torch.device = DEVICE) -> Tensor:
    """List the values that a layer says grow below a node of it."""
    return torch.tensor(typical_values(nodes, depth, 4)[::-1], dtype=torch.float32, device=device)


def some_children(batch: int, above: int, ranks: int, seed: int, device: torch.device = DEVICE) -> Children:
    """Draw distributions whose draws may run out, some of them sharp."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, above, ranks + 2, generator=generator) * 4 * torch.rand(1, generator=generator)
    dist = logits.softmax(-1)
    probs = dist[..., :ranks].clone()
    probs[torch.rand(batch, above, ranks, generator=generator) < 0.1] = 0.0
    probs = torch.where(torch.rand(batch, above, 1, generator=generator) < 0.1, probs.cumprod(-1), probs)
    reach = torch.rand(batch, above + 3, generator=generator)[:, :above]
    reach[:, above // 2 :: 3] = 0.0
    norms = torch.linalg.vector_norm(dist, dim=-1)
    return Children(reach.to(device), probs.to(device), norms.to(device))


def said(batch: int, above: int, ranks: int, seed: int, device: torch.device = DEVICE) -> tuple[Memory, Words]:
    """Draw texts of few words, and children of nodes of a tree, or of its root, that may be in them already."""
    generator = torch.Generator().manual_seed(seed)

    def words_of(*shape: int) -> Tensor:
        return torch.randint(5, (batch, *shape), generator=generator).to(device)

    memory = Memory.empty(batch, device)
    length = torch.randint(12, (batch,), generator=generator, dtype=torch.int32).to(device)
    remember(memory, words_of(12), None, length)
    room = 3 + above
    parents = (torch.rand(batch, room, generator=generator) * torch.arange(room)).int() - 1
    return memory, Words(words_of(above, ranks), words_of(room + 2)[:, :room], parents.to(device), 3)


class Ranked(NamedTuple):
    """What ``rate_by_rank`` takes."""

    fit: RankFit
    level: Level
    memory: Memory
    given: Children

    @classmethod
    def draw(cls, batch: int, above: int, ranks: int, seed: int, device: torch.device = DEVICE) -> Self:
        """Draw distributions, texts and levels; the first two seeds have no texts, odd ones surer younger children."""
        own = GreedyAcceptance(batch, max(ranks, 6), device).fit
        fit = RankFit(*(-getattr(own, field.name) for field in fields(own))) if seed % 2 else own
        shift = torch.linspace(-3, 4, batch, device=device) * seed  # none at first
        given = some_children(batch, above, ranks, seed, device)
        probs = given.probs.sort(-1, descending=True).values
        memory, words = said(batch, above, ranks, seed, device)
        given = replace(given, probs=probs, words=words if seed > 1 else None)
        return cls(fit, Level(shift, torch.ones_like(shift)), memory, given)


def some_table(batch: int, ranks: int, seed: int, device: torch.device = DEVICE) -> Table:
    """Give a table that some tests were counted in."""
    table = SampledAcceptance(batch, ranks, device).table
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(table.tests.shape, generator=generator).to(device) * 9
    passed = made * torch.rand(made.shape, generator=generator).to(device)
    return replace(table, tests=table.tests + made, passed=table.passed + passed)


class Given(NamedTuple):
    """What `GrownTree.add` takes beside a layer."""

    slots: Tensor
    is_taken: Tensor
    candidates: Candidates
    value: Tensor


class Forest:
    """A batch of trees that grow by slots, tokens and values that mean nothing."""

    def __init__(
        self, plan: Plan, batch: int, seed: int, device: torch.device = DEVICE, dtype: torch.dtype = torch.float32
    ) -> None:
        self.plan, self.generator = plan, torch.Generator().manual_seed(seed)
        self.batch, self.device, self.dtype = batch, device, dtype
        left = torch.full((batch,), plan.num_nodes, device=device)
        seen = Seen(self._drawn(50, 7), 1 + self._drawn(7), self._drawn(50))
        self.grown = GrownTree(seen, left, plan)

    def _drawn(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, (self.batch, *shape), generator=self.generator).to(self.device)

    def given(self, layer: Layer) -> Given:
        """Draw what a layer is made of."""
        frontier = self.grown.frontier_value
        above, ranks = frontier.shape[1], layer.ranks
        count = min(layer.width + layer.leaves, above * ranks)
        slots = torch.rand(self.batch, above * ranks, generator=self.generator).topk(count).indices.to(self.device)
        value = self._drawn(9, above, ranks).to(self.dtype) / 9
        value *= value.new_ones(()) if above == 1 else frontier.amax()
        is_taken = (self._drawn(3, count) > 0) & (value.flatten(1).gather(1, slots) > 0)
        tokens = self._drawn(50, above, ranks)
        return Given(slots, is_taken, Candidates(tokens, value), value)


def grown_tree(name: str, batch: int, seed: int) -> GrownTree:
    """Grow a tree to its last layer."""
    forest = Forest(LAYERS[name], batch, seed)
    for layer in forest.plan.layers:
        forest.grown.add(layer, *forest.given(layer))
    forest.grown.add_leaves()
    return forest.grown
