"""What acceptance takes and gives: the distributions of the drafted nodes, the accepted path."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stree.kernels.traversal.operands import DELTA, INDEPENDENT, SAMPLED

__all__ = ["DELTA", "INDEPENDENT", "SAMPLED", "Acceptance", "DraftLaws", "DraftProbs"]


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """From which distribution each node was drawn; of SAMPLED nodes the verifier masks earlier siblings out of it.

    Attributes:
        probs: float[batch, rows, vocab], after every draft-side processor; rows that no node names may hold anything.
        row: int32[batch, n], the row of each node; ignored for the root, padding and DELTA nodes.
        kind: int8[batch, n], SAMPLED (without replacement), DELTA (chosen without chance: top-k, retrieved) or
            INDEPENDENT (with replacement: from the distribution as it is, whatever the earlier siblings are).
        max_children: bound of a node's children known to the host; None reads it, which waits for a device.
    """

    probs: Tensor
    row: Tensor
    kind: Tensor
    max_children: int | None = None


DraftLaws = DraftProbs  # former name


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The accepted path of each sequence and the token after it.

    The path begins with the root, which was emitted before.  ``next_token`` is the bonus token where the path ends at a
    leaf, else the recovered token: drawn from what the rejected children leave of the target's distribution.

    Attributes:
        path: int32[batch, m], node indices, padded by -1; m is the host's bound on depth + 1.
        path_lengths: int32[batch], root included.
        next_token: int64[batch].
        ratios: float[batch, n], the verifier's log: of each drafted node min(1, p(x) / q(x)), the probability that its
            test accepts it, p being what its elder siblings' rejection leaves; undefined for the root and padding.
            None from greedy and MATCH, which test nothing.
        left: float[batch, vocab], distribution of the token after ``next_token``; from LONGEST only, which leaves it
        undrawn.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor
    ratios: Tensor | None = None
    left: Tensor | None = None

    @property
    def num_accepted(self) -> Tensor:
        """Drafted nodes accepted: int32[batch]."""
        return self.path_lengths - 1
