"""A baseline that verifies a tree without tree kernels: every root-to-leaf path is a row of a batch.

It takes the place of a ``TreeLM`` in ``stree.generate``: same weights, drafter, acceptance and tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["UnrolledLM", "UnrolledState"]


class UnrolledState:
    """A committed state, and the rows that the last verification keeps until the commit.

    Attributes:
        committed: the state of every sequence.
        verified: rows of the last tree's paths, place of each node in them, and their width.
    """

    def __init__(self, committed: DecodeState) -> None:
        self.committed = committed
        self.verified: Any = None

    @property
    def lengths(self) -> Tensor:
        """Committed tokens of each sequence: int32[batch]."""
        return self.committed.lengths

    @property
    def stacks(self) -> Any:
        """Tensors of the committed state, by the layers' specs."""
        return self.committed.stacks


class UnrolledLM(TreeLM):
    """Verify every root-to-leaf path as a row of a batch, each with its own copy of the state.

    Shared prefixes are run once for each leaf below them, as a system without tree kernels must.  Model and attributes
    are the target's.

    Args:
        lm: the target.
    """

    def __init__(self, lm: TreeLM) -> None:
        self.__dict__.update(lm.__dict__)
        self._lm, self.captures_steps = lm, False  # verification reads trees on the host, which a CUDA graph cannot

    def new_state(  # type: ignore[override]
        self, batch_size: int = 1, max_length: int = 4096, max_nodes: int = 64
    ) -> UnrolledState:
        """Allocate an empty state."""
        return UnrolledState(self._lm.new_state(batch_size, max_length, max_nodes))

    def prefill(  # type: ignore[override]
        self, state: UnrolledState, input_ids: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Run prompts."""
        return self._lm.prefill(state.committed, input_ids, lengths)

    def verify(self, state: UnrolledState, tree: TokenTree) -> Tensor:  # type: ignore[override]
        """Score every node: float[batch, n, vocab]; a node's logits are those of the first path through it."""
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        paths = [(row, path) for row, uppers in enumerate(parents) for path in _leaf_paths(uppers)]
        width = max(len(path) for _, path in paths)
        chains = [[tokens[row][node] for node in path] + [0] * (width - len(path)) for row, path in paths]
        above = [[*range(-1, len(path) - 1), *[-1] * (width - len(path))] for _, path in paths]
        place: list[dict[int, tuple[int, int]]] = [{} for _ in tokens]
        for number, (row, path) in enumerate(paths):
            for depth, node in enumerate(path):
                place[row].setdefault(node, (number, depth))
        device = tree.tokens.device
        rows = state.committed.select(torch.tensor([row for row, _ in paths], device=device))
        chain = TokenTree.unchecked(
            torch.tensor(chains, device=device), torch.tensor(above, dtype=torch.int32, device=device)
        )
        logits = self._lm.verify(rows, chain)
        state.verified = rows, place, width
        flat = [
            [number * width + depth for number, depth in (known.get(node, (0, 0)) for node in range(len(parents[0])))]
            for known in place
        ]
        return logits.flatten(0, 1)[torch.tensor(flat, device=device)]

    def commit(  # type: ignore[override]
        self, state: UnrolledState, path: Tensor, path_lengths: Tensor
    ) -> None:
        """Commit the accepted part of the row that holds it, and keep that row."""
        rows, place, width = state.verified
        lengths = torch.zeros(rows.batch_size, dtype=torch.int32)
        kept = []
        for known, nodes, length in zip(place, path.tolist(), path_lengths.tolist(), strict=True):
            kept.append(known[nodes[max(length, 1) - 1] if length else 0][0])
            lengths[kept[-1]] = length
        device = path.device
        chain = torch.arange(width, dtype=torch.int32, device=device).expand(rows.batch_size, width)
        self._lm.commit(rows, chain, lengths.to(device))
        state.committed, state.verified = rows.select(torch.tensor(kept, device=device)), None


def _leaf_paths(parents: list[int]) -> list[list[int]]:
    """List the root-to-leaf paths of one tree; padding (parent -1 past the root) is on none."""
    inner = set(parents)
    paths = []
    for leaf, parent in enumerate(parents):
        if leaf in inner or (leaf and parent < 0):
            continue
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths
