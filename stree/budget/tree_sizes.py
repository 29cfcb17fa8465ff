"""Tree sizes that the budget controller may choose from, plain decoding among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PLAIN", "Choice", "flat_choices", "layered_choices"]

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
COARSE_NODES, COARSE_DEPTHS = (4, 8, 16, 32, 64, 128), (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Choice:
    """A tree size.

    Attributes:
        nodes: largest number of nodes, root included; 1 is plain decoding.
        depth: largest number of draft calls of a model that grows layer by layer; 0 for plain decoding.
    """

    nodes: int
    depth: int


PLAIN = Choice(1, 0)


def layered_choices(max_nodes: int, max_depth: int, *, is_coarse: bool = False) -> list[Choice]:
    """List sizes for a draft model whose tree grows a layer a call, plain decoding first.

    Args:
        max_nodes: largest number of nodes, root included.
        max_depth: largest number of draft calls.
        is_coarse: whether to list a few sizes only, because each one is captured as a CUDA graph.

    Raises:
        ValueError: a size below 1.
    """
    if max_nodes < 1 or max_depth < 1:
        raise ValueError(f"max_nodes and max_depth must be at least 1, got {max_nodes} and {max_depth}")
    depths = [depth for depth in (COARSE_DEPTHS if is_coarse else DEPTHS) if depth < max_depth] + [max_depth]
    sizes = _sizes(max_nodes, COARSE_NODES if is_coarse else NODES)
    return [PLAIN, *(Choice(nodes, depth) for nodes in sizes for depth in depths if depth < nodes)]


def flat_choices(max_nodes: int) -> list[Choice]:
    """List sizes for trees whose depth costs nothing (retrieval), plain decoding first.

    Raises:
        ValueError: a size below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    return [Choice(nodes, nodes - 1) for nodes in (1, *_sizes(max_nodes, NODES))]


def _sizes(max_nodes: int, sizes: Sequence[int]) -> list[int]:
    """Numbers of nodes above 1: those of ``sizes`` below ``max_nodes``, and ``max_nodes``."""
    return [nodes for nodes in sizes if 1 < nodes < max_nodes] + [max_nodes] * (max_nodes > 1)
