"""The front door to traversal verification in Triton: tests, coins, the walk and the next token.

Its specification is `stree.verify.traversal`, in torch.  Nothing waits for a device; shapes are fixed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.checks import check, check_rank

__all__ = ["DraftRows", "TraversedPath", "traverse"]


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """Logits that the nodes were drawn from.

    Attributes:
        probs: float[b, rows, vocab].
        row: int[b, n], the row of each node.
        kind: int8[b, n].
        delta: kind of a node whose distribution is one-hot; its row is not read.
        independent: kind of a node that was drawn from its row whatever its elder siblings are; nodes of any other
            kind were drawn from what their elders leave of it.
    """

    probs: Tensor
    row: Tensor
    kind: Tensor
    delta: int
    independent: int


@dataclass(frozen=True, slots=True, eq=False)
class TraversedPath:
    """The accepted path of each sequence, the token after it, and what the coins were tossed with.

    Attributes:
        path: int32[b, m], nodes from the root down, padded by -1.
        path_lengths: int32[b], root included.
        next_token: int64[b].
        ratios: float32[b, n], min(1, p / q) at each drafted node's token; 0 for the root and padding.
        coins: float32[b, n], probability with which each drafted node's coin shows; undefined for the root and padding.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor
    ratios: Tensor
    coins: Tensor


def traverse(
    tokens: Tensor,
    parents: Tensor,
    mask: Tensor,
    depths: Tensor,
    dist: Tensor,
    draft: DraftRows | None = None,
    *,
    max_depth: int,
    max_children: int | None = None,
    seed: int | Tensor,
    sequences: Tensor,
    positions: Tensor,
) -> TraversedPath:
    """Test all nodes, toss their coins, walk down to the first in post-order that shows, and draw the next token.

    Coins are tossed with the numbers of the counters (positions, sequences, 1, node), the next token is drawn with
    that of (positions + depth + 1, sequences, 0, 0).

    Args:
        tokens: int64[b, n].
        parents: int32[b, n].
        mask: bool[b, n, n], ancestors of each node, itself included.
        depths: int32[b, n].
        dist: float32[b, n, vocab], the target's.
        draft: distributions of the nodes; None where all are one-hot.
        max_depth: bound of the depths; the paths have min(n, max_depth + 1) entries.
        max_children: bound of a node's children; None for n - 1.
        seed: key of the numbers, an integer or int64[].
        sequences: int64[b].
        positions: int64[b], position of the root.

    Raises:
        RuntimeError: tensors are not on a CUDA device, and Triton does not interpret.
        ValueError: shapes or devices disagree.
        TypeError: dtypes do.
        NotImplementedError: more nodes or tokens than the kernels have room for.
    """
    check_rank("dist", dist, "b n vocab")
    batch, n, vocab = dist.shape
    check("dist", dist, "float32", (batch, n, max(vocab, 1)), dist)
    check("tokens", tokens, "int64", (batch, n), dist)
    check("parents", parents, "int32", (batch, n), dist)
    check("depths", depths, "int32", (batch, n), dist)
    check("sequences", sequences, "int64", (batch,), dist)
    check("positions", positions, "int64", (batch,), dist)
    if mask.shape != (batch, n, n) or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool[{batch}, {n}, {n}], got {str(mask.dtype)[6:]}{[*mask.shape]}")
    if isinstance(seed, Tensor):
        check("seed", seed, "int64", (), dist)
    if draft is not None:
        check_rank("draft.probs", draft.probs, "b rows vocab")
        check("draft.probs", draft.probs, "float", (batch, draft.probs.shape[1], vocab), dist)
        shapes = [*draft.row.shape], [*draft.kind.shape]
        if shapes != ([batch, n], [batch, n]):
            raise ValueError(f"draft.row and draft.kind must be [{batch}, {n}], got {shapes[0]} and {shapes[1]}")
    if not dist.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"traverse needs CUDA tensors, got a tensor on {dist.device}")
    from stree.kernels import traversal

    return traversal.traverse(
        (tokens, parents, mask, depths), dist, draft, (seed, sequences, positions),
        max_depth=max_depth, max_children=max_children,
    )  # fmt: skip
