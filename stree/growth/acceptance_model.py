"""Acceptance models: the estimated probability that the target accepts a child.

The priority of a slot must not depend on the token that is drawn there, so it is computed before the draw.  The value
of a node may depend on its token.  Both are defined in ``stree.growth.plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.growth.plan import Plan
from stree.kernels.tree_growth.operands import Children, Kept, Words
from stree.kernels.tree_growth.reference import spent_before
from stree.sampling import Random
from stree.tree import TokenTree

__all__ = [
    "AcceptanceModel", "DraftProbability", "KeptSlots", "PathProbability", "Proposal", "Slots", "spent_before",
]  # fmt: skip

KeptSlots = Sequence[Kept | None]  # what a model returned from ``keep``, layer by layer


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A proposed tree, as an acceptance model learns from it.

    Attributes:
        tree: the proposed tree.
        values: float[batch, n], values of its nodes.
        column: int64[batch, n], number of each of its nodes among the root and all nodes that were grown; None where
            all nodes were proposed.
        kept_slots: what the model returned from ``keep`` for the nodes that were grown, layer by layer.
    """

    tree: TokenTree
    values: Tensor
    column: Tensor | None
    kept_slots: KeptSlots


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The slots below a layer, and their children.

    Attributes:
        values: float[batch, above], values of the layer's nodes.
        probs: float[batch, above, ranks], draft probability of each child, 0 where there is none.
        dist: float[batch, above, vocab], distribution that drawn children were drawn from.
        norms: float[batch, above], Euclidean norms of ``dist``; None: computed where they are needed.
        context: tokens of the children and of the nodes above them, for the n-gram table; None: unknown.
    """

    values: Tensor
    probs: Tensor
    dist: Tensor
    norms: Tensor | None = None
    context: Words | None = None

    def children(self) -> Children:
        """Return the children as the kernels take them."""
        norms = torch.linalg.vector_norm(self.dist, dim=-1) if self.norms is None else self.norms
        return Children(self.values, self.probs, norms, self.context)


class AcceptanceModel:
    """Estimates acceptance probabilities for the trees of one run; it may learn from what was accepted.

    A drafter calls ``begin`` for every tree; then, for every layer, ``draws`` after the draft call, ``rate`` once the
    children are known, ``keep`` with the slots that became nodes, and ``goes_on``; and ``learn`` after verification.
    Every method but ``rate`` does nothing unless it is overridden.  A model that overrides ``learn`` or ``read_text``
    keeps what it learns in one row for each text; where texts join and leave a batch it needs ``reset`` and ``select``.
    """

    def begin(self, plan: Plan, rng: Random) -> None:
        """Prepare for a new tree.

        Args:
            plan: of the tree.
            rng: random numbers of this step.
        """

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Estimate the acceptance probabilities of the slots below a layer; ``slots`` are only read.

        Returns:
            float[batch, above, ranks] twice: priorities of the slots, which never grow from a drawn sibling to the
            next and are 0 where there is no child, and values of the children.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement rate")

    def draws(self, values: Tensor, dist: Tensor) -> Tensor | None:
        """Decide after a draft call whether tokens are drawn from its distributions.

        Args:
            values: float[batch, above], values of the nodes that were run, 0 where there is none.
            dist: float[batch, above, vocab].

        Returns:
            bool[batch], or None where tokens are always drawn.
        """
        return None

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Decide before the next draft call whether anything grows below a new layer.

        Args:
            values: float[batch, width], values of the layer's nodes without its leaves, 0 where there is none.

        Returns:
            bool[batch], or None where growth always continues.
        """
        return None

    def keep(self, slots: Tensor) -> Kept | None:
        """Return what ``learn`` needs of new nodes: int64[batch, width] of the slots rated last became nodes."""
        return None

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Learn from verification.

        Args:
            proposal: the verified tree.
            ratios: float[batch, n], acceptance probability of each node's test; where the verifier keeps no log of
                its tests, 1 for accepted nodes and 0 for others.
            is_live: bool[batch], sequences that took part.
        """

    def read_text(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Read tokens that are appended to the texts, prompts included.

        Args:
            tokens: int64[batch, n], of a tree, or of the texts themselves.
            path: int32[batch, m], the tree's nodes whose tokens are read; None: all tokens in their order.
            lengths: int32[batch], how many of them; 0 where nothing is read.
        """

    def reset(self, row: int) -> None:
        """Reset what was learnt of a sequence: its row of the batch gets a new one."""
        self._check_learns_nothing("reset(row)")

    def select(self, rows: Tensor) -> AcceptanceModel:
        """Return the model of some sequences, int64[batch']; one that learns copies what it has learnt of each."""
        self._check_learns_nothing("select(rows)")
        return self

    def _check_learns_nothing(self, method: str) -> None:
        """Refuse a model that learns from texts, whose rows would mix them."""
        kind, base = type(self), AcceptanceModel
        if kind.learn is not base.learn or kind.read_text is not base.read_text:
            raise NotImplementedError(
                f"{kind.__name__} learns from texts: where they join and leave a batch it needs {method}"
            )


class PathProbability(AcceptanceModel):
    """Children taken without randomness: the product of the draft probabilities on the path (OPT-Tree, EAGLE-2)."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the path probability of every child, twice."""
        value = slots.values[..., None] * slots.probs
        return value, value


class DraftProbability(AcceptanceModel):
    """Drawn children: each test accepts with the draft's own probability (DySpec)."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the probability that verification tests each slot, and the path probability of its child."""
        # The sum leaves the child's own probability out: no rounding may let a priority depend on the slot's own token
        # or exceed that of an earlier sibling.
        values, probs = slots.values[..., None], slots.probs
        spent = spent_before(probs)
        return values * (1 - spent).clamp(min=0) * (probs > 0), values * probs
