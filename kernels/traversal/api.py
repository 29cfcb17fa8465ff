"""Traversal verification: the tests of all nodes and the walk, or all of it with its draws in Triton.

The specification is `stree.kernels.traversal.reference`, in torch.  In Triton nothing reads the device and shapes are
fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.checks import check, check_rank
from stree.kernels.dispatch import check_launch, host_can_read
from stree.kernels.traversal import reference
from stree.kernels.traversal.operands import DraftProbs, DraftRows, Held, TraversedPath, Tree, Walked

__all__ = ["hold", "traverse", "walk"]


def hold(tree: Tree, target_probs: Tensor, draft: DraftProbs | None, max_depth: int) -> Held:
    """Test all nodes, from parents to children and from elder to younger siblings.

    Args:
        tree: n nodes.
        target_probs: float[b, n, vocab], normalised; overwritten.
        draft: distributions of the nodes; None where all are one-hot.
        max_depth: bound of the depths.

    Raises:
        ValueError: on the CPU: a drafted token is outside the vocabulary.
    """
    if host_can_read(target_probs):
        from stree.kernels.traversal import cpu  # imports numba

        return cpu.hold(tree, target_probs, draft, max_depth)
    return reference.hold(tree, target_probs, draft, max_depth)


def walk(tree: Tree, is_passed: Tensor, max_depth: int) -> Walked:
    """Walk down to the first node in post-order that passes.

    Args:
        tree: n nodes.
        is_passed: bool[b, n], of padding False; overwritten.
        max_depth: bound of the depths; the paths have min(n, max_depth + 1) entries.

    Raises:
        ValueError: on the CPU: a path is longer.
    """
    if host_can_read(is_passed):
        from stree.kernels.traversal import cpu

        return cpu.walk(tree, is_passed, max_depth)
    return reference.walk(tree, is_passed, max_depth)


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
    """Test all nodes, draw which nodes pass, walk down to the first in post-order that does, and draw the next token.

    Coins are tossed with the numbers of the counters (positions, sequences, 1, drafted nodes up to this one), the next
    token is drawn with that of (positions + depth + 1, sequences, 0, 0).

    Args:
        tokens: int64[b, n].
        parents: int32[b, n].
        mask: bool[b, n, n], ancestors of each node, itself included.
        depths: int32[b, n].
        dist: float32[b, n, vocab], the target's.
        draft: distributions of the nodes; None where all are one-hot.
        max_depth: bound of the depths; the paths have min(n, max_depth + 1) entries.
        max_children: bound of a node's children; None for n - 1.
        seed: key of the numbers: an integer, or int64[b], one for each sequence.
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
        check("seed", seed, "int64", (batch,) if seed.dim() else (), dist)
    if draft is not None:
        check_rank("draft.probs", draft.probs, "b rows vocab")
        check("draft.probs", draft.probs, "float", (batch, draft.probs.shape[1], vocab), dist)
        shapes = [*draft.row.shape], [*draft.kind.shape]
        if shapes != ([batch, n], [batch, n]):
            raise ValueError(f"draft.row and draft.kind must be [{batch}, {n}], got {shapes[0]} and {shapes[1]}")
    check_launch("traverse", dist)
    from stree.kernels.traversal import kernel

    return kernel.traverse(
        (tokens, parents, mask, depths), dist, draft, (seed, sequences, positions),
        max_depth=max_depth, max_children=max_children,
    )  # fmt: skip
