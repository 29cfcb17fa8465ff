"""The state of a one-shot draft head: keys and values of its context, which are projections of the target's states."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from stree.drafters.base import Draft
from stree.drafters.feature_state import FeatureState
from stree.growth import Plan
from stree.kernels.dispatch import host_bound
from stree.kernels.step.texts import Seen
from stree.models.heads.dflash import OneShotHead
from stree.models.heads.dflash_head import BlockCache, BlockSlots
from stree.models.state import DecodeState
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["BlockState", "within_block"]


class BlockState(FeatureState):
    """One forward of the head serves a whole tree: the nodes of a depth share the distribution of their position.

    What the target has computed at accepted tokens is projected and appended to the context after every step; what a
    block leaves is dropped.  The first layer of a tree runs the block, later ones only look up what it gave.

    A node is drawn from the distribution that is stored for it: that of its position, whatever its ancestors are, or,
    with DSpark's bias or DFlash2's selector, that of its position after its parent's token.  Distributions that ignore
    ancestors are worse drafts, never wrong ones, so every verifier and growth is lossless as with a draft model.

    Args:
        head: projects the context and runs blocks.
        prompts: of the first texts.
    """

    head: OneShotHead
    _slots: BlockSlots  # of the tree that grows

    @property
    def _cache(self) -> BlockCache:
        """The context, which takes the place of a decode state once ``run_prompts`` was called."""
        return cast(BlockCache, self.decode_state)

    def run_prompts(self) -> None:
        """Allocate the context, unless there is one; ``catch_up`` fills it."""
        if self._state is None:
            self._state = cast(DecodeState, BlockCache(self.head, len(self.prompts), self.max_length))
            self.version += 1

    def reserve_nodes(self, nodes: int) -> None:
        """Do nothing: a context has room for a block, and nodes take none."""

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Append the features of accepted tokens, from ``acceptance.hidden``, or queue them if none was drafted.

        Raises:
            ValueError: the caller has recorded no hidden states.
        """
        features = self._features(draft, acceptance)
        if draft.grown is None:
            self._put(features, acceptance.path_lengths.long())
        else:
            self.head.append(self._cache, features, acceptance.path_lengths)

    def catch_up(self, seen: Seen) -> int:
        """Append what is queued; projections are no draft call."""
        if self.most_behind:
            most = host_bound(self._number, self.most_behind, waits=self._is_united)
            if most:
                self.head.append(self._cache, self._queue[:, :most], self._number)
            self._number.zero_()
            self.most_behind = 0
        return 0

    def fitted(self, plan: Plan) -> Plan:
        """Return a plan whose trees lie within a block."""
        return within_block(super().fitted(plan), self.head.num_drafted)

    def num_calls(self, num_scored: int) -> int:
        """Count the call for the block."""
        return min(num_scored, 1)

    def node_logits(self, tree: TokenTree, first: int) -> Tensor:
        """Look up the logits of the positions after the nodes ``first``..; the first call runs the block."""
        if first == 0:
            self._slots = self.head.slots(self._cache, tree.tokens[:, 0])
        return self.head.node_logits(self._slots, tree.depths[:, first:], tree.tokens[:, first:])


def within_block(plan: Plan, depth: int) -> Plan:
    """Leave out the layers of a plan below ``depth``, which a block does not reach."""
    layers = plan.layers[:depth]
    most = plan.num_nodes if plan.is_heap else sum(layer.width + layer.leaves for layer in layers)
    depth = min(depth, depth if plan.max_depth is None else plan.max_depth)
    return replace(plan, layers=layers, num_nodes=min(plan.num_nodes, most), max_depth=depth)
