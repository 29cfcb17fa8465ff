"""Traversal verification: the tests of all nodes and the walk, or all of it with its draws in Triton.

The specification is `stree.kernels.traversal.reference`, in torch.  In Triton nothing reads the device and shapes are
fixed.
"""

from __future__ import annotations

from torch import Tensor

from stree.kernels.dispatch import check_launch, host_can_read
from stree.kernels.traversal import reference
from stree.kernels.traversal.operands import DraftProbs, Held, TraversedPath, Tree, Walked

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
    tree: Tree, dist: Tensor, draft: DraftProbs | None, *, max_depth: int, seed: int | Tensor, sequences: Tensor,
    positions: Tensor,
) -> TraversedPath:  # fmt: skip
    """Test all nodes, draw which nodes pass, walk down to the first in post-order that does, and draw the next token.

    Coins are tossed with the numbers of the counters (positions, sequences, 1, drafted nodes up to this one), the next
    token is drawn with that of (positions + depth + 1, sequences, 0, 0).

    Args:
        tree: n nodes.
        dist: float32[b, n, vocab], the target's.
        draft: distributions of the nodes; None where all are one-hot.
        max_depth: bound of the depths; the paths have min(n, max_depth + 1) entries.
        seed: key of the numbers: an integer, or int64[b], one for each sequence.
        sequences: int64[b].
        positions: int64[b], position of the root.

    Raises:
        RuntimeError: tensors are not on a CUDA device, and Triton does not interpret.
        NotImplementedError: more nodes or tokens than the kernels have room for.
    """
    check_launch("traverse", dist)
    from stree.kernels.traversal import kernel

    return kernel.traverse(
        (tree.tokens, tree.parents, tree.ancestor_mask, tree.depths), dist, draft, (seed, sequences, positions),
        max_depth=max_depth, max_children=None if draft is None else draft.max_children,
    )  # fmt: skip
