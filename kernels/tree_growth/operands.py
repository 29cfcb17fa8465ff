"""What the operations of tree growth take and return; see `stree.kernels.tree_growth.api`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

__all__ = [
    "Appended", "Children", "Chosen", "Columns", "Kept", "Layout", "Level", "Memory", "Proposed",
    "RankFit", "Ratings", "Table", "Terms", "Verdicts", "Words",
]  # fmt: skip

NUM_PLACES = 1 << 18  # of the pairs of tokens that a text holds, and as many of its triples


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits on the slots that a layer takes.

    Attributes:
        width: most slots.
        threshold: least value of a slot that is taken beyond an equal share of what is left.
        layers_left: what is left is shared by so many layers, this one counted.
    """

    width: int
    threshold: float
    layers_left: int


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Counts of tests and of those passed, a row of cells a sequence.

    A child falls into a cell before its draw, by its rank and by how sharp its distribution is, and into another after
    it, also by its own probability.  Cells are numbered ranks x sharpness; behind those are ranks x sharpness x
    confidence.

    Attributes:
        passed: float32[batch, cells], tests passed.
        tests: float32[batch, cells], tests made; positive.
        sharpness: float32[m], ascending edges of the sum of squares.
        confidence: float32[k], ascending edges of the probability.
        rank: int64[ranks], 0, 1, 2, ...
    """

    passed: Tensor
    tests: Tensor
    sharpness: Tensor
    confidence: Tensor
    rank: Tensor

    @property
    def first_after(self) -> int:
        """The first cell of those after a draw."""
        return len(self.rank) * (len(self.sharpness) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class RankFit:
    """Log-odds of a child: a level and slopes by the log of its probability and by how sharp its distribution is.

    Sharpness is -log(1 - the sum of squared probabilities).  Pairs and triples of tokens that the text already holds
    add to the log-odds: those that the child ends, and those that another child of its parent ends.

    Attributes:
        level: float32[ranks].
        by_confidence: float32[ranks].
        by_sharpness: float32[ranks].
        by_text: float32[4, ranks], where the text holds the child's pair, its triple, another's pair, another's triple.
    """

    level: Tensor
    by_confidence: Tensor
    by_sharpness: Tensor
    by_text: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The level of each text beside a fit, learnt from its likeliest children; their siblings share the remainder.

    Attributes:
        shift: float32[batch], added to the log-odds of each node's likeliest child.
        weight: float32[batch], the information that it rests on, the prior's included; positive.
    """

    shift: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Which pairs and triples of tokens each text holds, by their hashes, which may collide.

    Attributes:
        places: bool[batch, 2 * num_places + 1], of pairs, of triples, and one for what is neither.
        last: int64[batch, 2], the last two tokens that were read; -1 where there is none.
    """

    places: Tensor
    last: Tensor

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Self:
        """Make the memory of texts that have not begun."""
        places = torch.zeros(batch, 2 * NUM_PLACES + 1, dtype=torch.bool, device=device)
        return cls(places, torch.full((batch, 2), -1, dtype=torch.long, device=device))

    @property
    def num_places(self) -> int:
        """How many places pairs have, and triples."""
        return self.places.shape[1] // 2

    def forget(self, row: int) -> None:
        """Let another text begin in the place of one."""
        self.places[row] = False
        self.last[row] = -1


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The tokens of children, and the columns of their parents in the tree that grows.

    Attributes:
        children: int64[batch, above, ranks].
        tokens: int64[batch, columns].
        parents: int32[batch, columns], -1 for padding.
        first: column of the first parent, the others behind it.
    """

    children: Tensor
    tokens: Tensor
    parents: Tensor
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The children of a layer's nodes, as they are rated.

    Attributes:
        reach: float[batch, above], values of the nodes.
        probs: float[batch, above, ranks], draft probabilities of their children, 0 where there is none.
        norms: float[batch, above], Euclidean norms of the nodes' distributions; of drawn children, of what they were
        drawn from.
        words: tokens of the children and of the nodes above them, which ratings by a table do not read; or None.
    """

    reach: Tensor
    probs: Tensor
    norms: Tensor
    words: Words | None = None


class Ratings(NamedTuple):
    """What slots are worth.

    Attributes:
        priority: float[batch, above, ranks], independent of the draw.
        value: float[batch, above, ranks], of the child that was drawn.
        cells: int64[batch, above, ranks, 2], before the draw and after it.
    """

    priority: Tensor
    value: Tensor
    cells: Tensor


class Kept(NamedTuple):
    """The slots of a layer that became nodes.

    Attributes:
        cells: int64[batch, above, ranks, 2], of all slots, as `Ratings` has them.
        slots: int64[batch, width], of the nodes.
    """

    cells: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """Acceptance probabilities of a tree's nodes from verification.

    Attributes:
        parents: int32[batch, n], -1 for the root and for padding.
        mask: bool[batch, n, n], ancestors of each node, itself included.
        numbers: int64[batch, n], of each node among the root, 0, and all that became nodes; None: 0, 1, 2, ...
        ratios: float[batch, n], acceptance probability of each node's test.
        is_live: bool[batch], sequences that took part.
    """

    parents: Tensor
    mask: Tensor
    numbers: Tensor | None
    ratios: Tensor
    is_live: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A growing tree's columns, laid out once for its largest size; every tensor is contiguous.

    Column 0 is the last token before the root, column 1 the root; node i is column i + 1.

    Attributes:
        tokens: int64[batch, room].
        parents: int32[batch, room].
        depths: int32[batch, room].
        mask: bool[batch, room, room], ancestors of each column; a new one has itself alone.
        values: float32[batch, room - 1], of the columns but the first.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Slots that become the nodes of a layer, and what all slots offer.

    Attributes:
        slots: int64[batch, count].
        is_taken: bool[batch, count].
        value: float32[batch, above, ranks], of each slot's child.
        tokens: int64[batch, above, ranks].
    """

    slots: Tensor
    is_taken: Tensor
    value: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns the nodes of a layer take.

    Attributes:
        width: nodes that are appended; the others are leaves, which are appended when the tree is grown.
        frontier: first column of the layer above.
        size: columns in use.
        num_nodes: only nodes are kept that as many others of the tree and the layer, and no more, may be better than;
            None to keep all.
        is_cut: whether slots that are taken come first, so that the host may leave out columns that none needs.
    """

    width: int
    frontier: int
    size: int
    num_nodes: int | None
    is_cut: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Appended:
    """The nodes of a layer.

    Attributes:
        width: columns appended; on the CPU none that is padding in every row, if taken slots come first.
        values: float32[batch, count], 0 where there is none.
        column: int64[batch, count], that each is below; None where the layer has no leaves.
        tokens: int64[batch, count], likewise.
    """

    width: int
    values: Tensor
    column: Tensor | None
    tokens: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Proposed:
    """A grown tree as the target sees it: nodes in place of columns, the root first.

    Attributes:
        tokens: int64[batch, n].
        parents: int32[batch, n].
        depths: int32[batch, n].
        mask: bool[batch, n, n].
        values: float32[batch, n].
        rows: int32[batch, n], each node's parent among all nodes that were grown.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    values: Tensor
    rows: Tensor
