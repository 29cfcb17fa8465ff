"""Drafting with a head that reads the target's hidden states, such as the target's own MTP layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from stree.drafters.base import Draft, Drafter, check_vocabulary
from stree.drafters.block_state import BlockState, within_block
from stree.drafters.head_state import HeadState
from stree.drafters.model import _ModelRun
from stree.drafters.slot_state import SlotState
from stree.growth import Calibrated, Growth, Plan
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash import OneShotHead
from stree.models.heads.specblock import SpecBlockHead
from stree.models.tree_lm import TreeLM
from stree.sampling import Random
from stree.tree import TokenTree

__all__ = ["HeadDrafter"]


class HeadDrafter(Drafter):
    """Draft with a head of the target; see ``stree.heads.load``.

    A head grows a tree by any growth, and its trees are lossless as a draft model's are: nodes are drawn from
    distributions that are stored, whatever the features were.  A one-shot head runs once for a tree, so its default
    growth is as deep as its block; see `BlockState`.

    Args:
        head: of the target that is to be drafted for.
        vocab: tokens that it may draft, as for ``ModelDrafter``; None for all that it predicts.

    Raises:
        TypeError: something else than a head.
        ValueError: tokens that are none of the vocabulary's.
        NotImplementedError: a head that cannot be trimmed.
    """

    default_growth: Growth = Calibrated()

    def __init__(self, head: CausalHead | OneShotHead, vocab: Sequence[int] | Tensor | None = None) -> None:
        if not isinstance(head, (CausalHead, OneShotHead)):
            raise TypeError(f"head must be a draft head, as stree.heads.load returns, got {type(head).__name__}")
        self.head = head if vocab is None else head.trimmed(vocab)
        if isinstance(head, OneShotHead):
            self.default_growth = Calibrated(depth=head.num_drafted)

    @property
    def models(self) -> Sequence[TreeLM]:
        """The head."""
        return [cast(TreeLM, self.head)]

    @property
    def hidden_layers(self) -> Sequence[int]:
        """Layers of the target whose hidden states the head reads."""
        return self.head.hidden_layers

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _ModelRun:
        """Begin a run, which needs the target's hidden states of the prompts."""
        check_vocabulary(self.models[0], vocab_size)
        (lm,) = self.models
        if isinstance(self.head, SpecBlockHead):
            return _SlotRun(lm, SlotState(self.head, prompts), rng)
        if isinstance(self.head, CausalHead):
            return _HeadRun(lm, HeadState(self.head, prompts), rng)
        return _BlockRun(lm, BlockState(self.head, prompts), rng)


class _HeadRun(_ModelRun):
    """A head's run: a draft model's, on a state that follows the target's hidden states."""

    _state: HeadState | BlockState

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        self._state.read_prompts(rows, hidden)

    def _logits(self, tree: TokenTree, first: int) -> Tensor:
        """Run the tree without its first token, which the head has read with the target's features."""
        below = TokenTree.unchecked(
            tree.tokens[:, 1:], (tree.parents[:, 1:] - 1).clamp_(min=-1), (tree.depths[:, 1:] - 1).clamp_(min=0),
            tree.ancestor_mask[:, 1:, 1:],
        )  # fmt: skip
        return self._state.verify(below, max(first - 1, 0))


class _SlotRun(_HeadRun):
    """A SpecBlock head's run: draft calls for blocks, and none for the layers that go on along them."""

    _state: SlotState

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        num_caught_up = self.settle(pending, budget)
        draft = super().propose(pending, growth, budget)
        return draft if budget == 1 else replace(draft, num_calls=num_caught_up + self._state.num_block_calls)


class _BlockRun(_HeadRun):
    """A one-shot head's run: trees within a block, and one draft call for each."""

    _state: BlockState

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        draft = super().propose(pending, growth, budget)
        return replace(draft, num_calls=min(draft.num_calls, 1))

    def _plan(self, growth: Growth, budget: int) -> Plan:
        return within_block(super()._plan(growth, budget), self._state.head.num_drafted)
