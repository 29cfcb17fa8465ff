"""What traversal verification takes and returns; see `stree.kernels.traversal.api`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from torch import Tensor

__all__ = [
    "DELTA", "INDEPENDENT", "NOTHING", "SAMPLED", "TINY", "DraftProbs", "Held", "TraversedPath", "Tree", "Walked",
]  # fmt: skip

SAMPLED: Final = 0  # kinds of drafted nodes, see `DraftProbs`
DELTA: Final = 1
INDEPENDENT: Final = 2
NOTHING: Final = 1e-20  # far below float32's rounding of 1, and far enough from its smallest number to divide by
TINY: Final = 1e-38  # a divisor that keeps 0 / 0 at 0; about the smallest normal float32


class Tree(Protocol):
    """Token trees, as `stree.tree.TokenTree` holds them."""

    @property
    def tokens(self) -> Tensor:
        """int64[b, n]."""

    @property
    def parents(self) -> Tensor:
        """int32[b, n], -1 for the root and for padding."""

    @property
    def depths(self) -> Tensor:
        """int32[b, n]."""

    @property
    def ancestor_mask(self) -> Tensor:
        """bool[b, n, n], each node itself included."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The distribution that each node was drawn from.

    Attributes:
        probs: float[batch, rows, vocab], after temperature, top-k and top-p of the draft; unused rows may hold
            anything.
        row: int32[batch, n], index into ``probs`` of each node; ignored for the root, padding and DELTA nodes.
        kind: int8[batch, n], SAMPLED (without replacement: the verifier masks the tokens of earlier siblings out of the
            stored distribution), DELTA (chosen deterministically: top-k, retrieved; its distribution is one-hot) or
            INDEPENDENT (with replacement: the stored distribution as it is).
        max_children: upper bound of a node's children, which spares a synchronisation with a device; None for n - 1.
    """

    probs: Tensor
    row: Tensor
    kind: Tensor
    max_children: int | None = None


class Held(NamedTuple):
    """Tests of all nodes.

    Attributes:
        accept_probs: float[b, n], acceptance probability of each drafted node.
        ratios: float[b, n], min(1, p / q) at each drafted node's token; undefined for the root and padding.
        left: float[b, n, vocab], not normalised: what is left of the target's distributions when all children failed.
    """

    accept_probs: Tensor
    ratios: Tensor
    left: Tensor


class Walked(NamedTuple):
    """Accepted paths.

    Attributes:
        path: int32[b, m], nodes from the root down, padded by -1.
        path_lengths: int32[b], root included.
        leaf: int64[b], the last node of each.
    """

    path: Tensor
    path_lengths: Tensor
    leaf: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TraversedPath:
    """The accepted path of each sequence, the token after it, and what the tests were drawn with.

    Attributes:
        path: int32[b, m], nodes from the root down, padded by -1.
        path_lengths: int32[b], root included.
        next_token: int64[b].
        ratios: float32[b, n], min(1, p / q) at each drafted node's token; 0 for the root and padding.
        accept_probs: float32[b, n], acceptance probability of each drafted node; undefined for the root and padding.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor
    ratios: Tensor
    accept_probs: Tensor
