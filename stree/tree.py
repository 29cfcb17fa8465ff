"""Token trees, which a drafter proposes and the target verifies: tokens and parents, without probabilities."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stree.kernels.checks import checks_everywhere, checks_values
from stree.kernels.tree_indices import ancestor_mask, prune

__all__ = ["TokenTree", "checks_everywhere"]

FIELDS = ("tokens", "parents", "depths", "ancestor_mask")


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    r"""A batch of token trees in topological order; node 0 is the root, the pending token.

    For example, a root with two children, the first of which has two children and the second one::

             0            parents = [-1, 0, 0, 1, 1, 2]
           /   \          depths  = [ 0, 1, 1, 2, 2, 2]
          1     2
         / \     \        ancestor mask     1 0 0 0 0 0
        3   4     5       (row: node,       1 1 0 0 0 0
                           column: its      1 0 1 0 0 0
                           ancestors and    1 1 0 1 0 0
                           itself)          1 1 0 0 1 0
                                            1 0 1 0 0 1

    Trees of one batch may differ; a smaller one is padded with nodes of parent -1 (at i > 0) and token 0. Siblings are
    in the order in which they were drawn.

    Attributes:
        tokens: int64[batch, n]; a 1-d input becomes a batch of one.
        parents: int32[batch, n]; parents[:, 0] == -1 and parents[:, i] < i.
        depths: int32[batch, n], distance from the root; 0 for padding.
        ancestor_mask: bool[batch, n, n], the node itself included; for padding only itself.
        is_checked: whether the constructor has checked the values (False from ``unchecked``).

    Raises:
        TypeError: tokens or parents are not integer tensors.
        ValueError: shapes disagree, or the parents are not a tree in topological order.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor = field(init=False)
    ancestor_mask: Tensor = field(init=False)
    is_checked: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        tokens, parents = _as_batch("tokens", self.tokens), _as_batch("parents", self.parents)
        if tokens.shape != parents.shape:
            raise ValueError(f"tokens and parents must have one shape, got {[*tokens.shape]} and {[*parents.shape]}")
        if tokens.shape[1] == 0:
            raise ValueError("a tree must have at least its root, got 0 nodes")
        # Copies, so that a later change of the caller's tensors cannot invalidate the checks and the derived fields.
        copies = tokens.to(torch.int64, copy=True), parents.to(torch.int32, copy=True)
        mask = ancestor_mask(copies[1])
        for name, value in zip(FIELDS, (*copies, mask.sum(-1, dtype=torch.int32) - 1, mask), strict=True):
            object.__setattr__(self, name, value)
        if checks_values(parents):
            if bool((wrong := self.parents != parents).any()):  # an int64 that wrapped around
                raise ValueError(f"parents must be int32, got {int(parents[wrong][0])}")
            self.check()

    @classmethod
    def unchecked(
        cls, tokens: Tensor, parents: Tensor, depths: Tensor | None = None, mask: Tensor | None = None
    ) -> TokenTree:
        """Make a tree inside the decode loop, without checking values, from depths and mask if they are known.

        Args:
            tokens: int64[batch, n].
            parents: int32[batch, n].
            depths: int32[batch, n], or None to derive them.
            mask: bool[batch, n, n], or None to derive it.
        """
        tree, mask = object.__new__(cls), ancestor_mask(parents) if mask is None else mask
        depths = mask.sum(-1, dtype=torch.int32) - 1 if depths is None else depths
        for name, value in zip((*FIELDS, "is_checked"), (tokens, parents, depths, mask, False), strict=True):
            object.__setattr__(tree, name, value)
        if checks_everywhere():
            tree.check()
        return tree

    @classmethod
    def chain(cls, tokens: Tensor | Sequence[int]) -> TokenTree:
        """Make a tree without branches from int64[n] or int64[batch, n] tokens, the root first."""
        tokens = _as_batch("tokens", tokens)
        batch, n = tokens.shape
        parents = torch.arange(-1, n - 1, dtype=torch.int32, device=tokens.device).expand(batch, n)
        return cls(tokens, parents.contiguous())

    @classmethod
    def from_paths(cls, paths: Iterable[Iterable[int]]) -> TokenTree:
        """Merge root-to-leaf token paths by their common prefixes; all begin with the same root token.

        Args:
            paths: tokens of each path, the root first; children are in the order of their first appearance.

        Raises:
            TypeError: a token is not an integer.
            ValueError: there is no path, a path is empty, or the roots differ.
        """
        try:
            token_paths = [list(map(operator.index, path)) for path in paths]
        except TypeError:
            raise TypeError(f"paths must be lists of tokens, integers, got {paths!r:.80}") from None
        if not token_paths or not all(token_paths):
            raise ValueError("from_paths needs at least one path, and no empty path")
        roots = sorted({path[0] for path in token_paths})
        if len(roots) != 1:
            raise ValueError(f"all paths must begin with the same root token, got {roots}")
        tokens, parents, children = [roots[0]], [-1], {}
        for path in token_paths:
            node = 0
            for token in path[1:]:
                if (node, token) not in children:
                    children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[node, token]
        return cls(torch.tensor(tokens), torch.tensor(parents, dtype=torch.int32))

    @property
    def num_nodes(self) -> Tensor:
        """Number of nodes of each tree without padding: int32[batch]."""
        return (~self.is_padding).sum(-1, dtype=torch.int32)

    @property
    def is_padding(self) -> Tensor:
        """Padding nodes: bool[batch, n]."""
        index = torch.arange(self.parents.shape[1], device=self.parents.device)
        return (self.parents < 0) & (index > 0)

    def prune(self, kept: Tensor) -> TokenTree:
        """Return the tree of int64[batch, count] kept nodes, whose parents are kept and come first."""
        if not (isinstance(kept, Tensor) and kept.dtype == torch.int64 and kept.dim() == 2):
            raise TypeError(f"kept must be a tensor int64[batch, count], got {kept!r:.80}")
        parents, mask = prune(kept, self.parents, self.ancestor_mask)
        return TokenTree.unchecked(self.tokens.gather(1, kept), parents, self.depths.gather(1, kept), mask)

    def check(self) -> None:
        """Raise ValueError for the first token or parent that is not valid."""
        for row, (tokens, parents) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            if parents[0] != -1:
                raise ValueError(f"parents[{row}, 0] must be -1 (the root), got {parents[0]}")
            for node, parent in enumerate(parents):
                if parent >= node or parent < -1:
                    raise ValueError(
                        f"parents[{row}, {node}] must be in [-1, {node - 1}] (a parent comes before its child), "
                        f"got {parent}"
                    )
                if parent > 0 and parents[parent] == -1:
                    raise ValueError(f"node {node} of row {row} is a child of padding node {parent}")
                if node and parent == -1 and tokens[node] != 0:
                    raise ValueError(f"padding node {node} of row {row} must have token 0, got {tokens[node]}")
                if tokens[node] < 0:
                    raise ValueError(f"tokens[{row}, {node}] must not be negative, got {tokens[node]}")


def _as_batch(name: str, value: Tensor | Sequence[int]) -> Tensor:
    """Convert integers of one or two dimensions to a [batch, n] tensor."""
    if isinstance(value, Sequence) and not value:
        raise ValueError("a tree must have at least its root, got 0 nodes")  # an empty list has no integer dtype
    try:
        tensor = torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):  # a value without a dtype, or rows of different lengths
        raise TypeError(f"{name} must be an integer tensor, got {type(value).__name__}") from None
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name} must be an integer tensor, got {tensor.dtype}")
    if tensor.dim() not in (1, 2):
        raise ValueError(f"{name} must be [n] or [batch, n], got {[*tensor.shape]}")
    return tensor[None] if tensor.dim() == 1 else tensor
