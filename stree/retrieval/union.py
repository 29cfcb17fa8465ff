"""Union of two trees of continuations."""

from __future__ import annotations

from stree.retrieval.continuations import Nodes

__all__ = ["unite"]


def unite(first: Nodes, first_size: int, second: Nodes, second_size: int, out: Nodes) -> int:
    """Merge two trees by common prefixes and keep the most probable nodes that fit; return the size with the root.

    A node that is in both has the larger of its values.
    """
    from stree.retrieval import numba_common  # imports numba

    return int(numba_common.merge(first, first_size, second, second_size, out))
