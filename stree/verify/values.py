"""Input and output of verification: the draft distributions of the nodes, and the accepted path."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stree.kernels.traversal.operands import DELTA, INDEPENDENT, SAMPLED, DraftProbs

__all__ = ["DELTA", "INDEPENDENT", "SAMPLED", "Acceptance", "DraftLaws", "DraftProbs"]


DraftLaws = DraftProbs  # former name


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The accepted path of each sequence and the token after it.

    The path begins with the root, which was emitted by the step before. ``next_token`` is the bonus token if the path
    ends at a leaf, else the recovered token, drawn from the residual distribution of the rejected children.

    Attributes:
        path: int32[batch, m], node indices, padded by -1; m is an upper bound of depth + 1.
        path_lengths: int32[batch], root included.
        next_token: int64[batch].
        ratios: float[batch, n], acceptance ratio of each drafted node, min(1, p(x) / q(x)) at its token x, where p is
            the residual distribution after its earlier siblings; undefined for the root and padding. None from greedy
            and MATCH.
        left: float[batch, vocab], the distribution of the token after ``next_token``, from LONGEST only.
        hidden: float[batch, m, layers, hidden], the target's hidden states at the path's nodes, where a drafter reads
            them; undefined past its length.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor
    ratios: Tensor | None = None
    left: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def num_accepted(self) -> Tensor:
        """Number of drafted nodes accepted: int32[batch]."""
        return self.path_lengths - 1
