"""Tests of drafted nodes against the target's distribution, and what their rejection leaves of it.

A test compares what is left of p at a node with the distribution q of its child, at the child's token; a rejection
leaves max(r p - q, 0), normalised, r being the probability with which the node itself is held.  Which tests wait for
which is for the rules to know.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from stree.kernels.dispatch import host_can_read
from stree.kernels.traversal.operands import NOTHING, TINY
from stree.tree import TokenTree
from stree.verify.paths import Siblings
from stree.verify.values import DELTA, INDEPENDENT, DraftProbs

__all__ = ["Trials"]


class Trials:
    """What is left of the target's distribution at every node while its children are tested in draw order.

    Attributes:
        siblings: the children's order.
        ratio: float[batch, n + 1], of each tested node p / q at its token; the last column is no node's.
    """

    def __init__(self, tree: TokenTree, target_probs: Tensor, draft: DraftProbs | None) -> None:
        self.siblings = Siblings.of(tree, None if draft is None else draft.max_children)
        self._left, self._mass = target_probs, torch.ones_like(target_probs[..., 0])  # not normalised; its sum
        self.ratio = pad(torch.zeros_like(self._mass), (0, 1))
        self._batch = torch.arange(len(target_probs), device=target_probs.device)[:, None]
        self._probs = None if draft is None else draft.probs
        self._token = pad(tree.tokens, (0, 1))
        self._facts = pad(_facts(tree, self.siblings, draft).to(target_probs.dtype), (0, 0, 0, 1))
        self._row = None if draft is None else pad(draft.row.long().clamp(0, draft.probs.shape[1] - 1), (0, 1))

    def first_ratios(self) -> Tensor:
        """Give p / q at the token of every drafted node before any test: float[batch, n]."""
        return self._left[self._batch, self.siblings.parents, self._token[:, :-1]] * self._facts[:, :-1, 0]

    def waves(self, wave: Tensor, num_waves: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through the tests in order: nodes int64[k], and int64[batch, k] one child of each, n where there is none.

        Args:
            wave: int64[batch, n], when each drafted node is tested; siblings at different times.
            num_waves: bound of them.
        """
        batch, n = wave.shape
        place = torch.where(self.siblings.is_drafted, wave * n + self.siblings.parents, num_waves * n)
        index = torch.arange(n, device=wave.device)
        child = torch.full((batch, num_waves * n + 1), n, device=wave.device).scatter_(1, place, index.expand(batch, n))
        child = child[:, :-1].view(batch, num_waves, n)
        if not host_can_read(wave):  # all nodes in every wave: nothing is waited for
            yield from ((index, child[:, number]) for number in range(num_waves))
            return
        numbers, nodes = (child < n).any(0).nonzero().T
        begin = 0
        for number, count in enumerate(torch.bincount(numbers, minlength=num_waves).tolist()):
            if count:
                chosen = nodes[begin : begin + count]
                yield chosen, child[:, number].index_select(1, chosen)
            begin += count

    def test(self, nodes: Tensor, child: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """Test a child of some nodes, and take its distribution away from what is left there, as if it were rejected.

        Args:
            nodes: int64[k].
            child: int64[batch, k].
            held: float[batch, k], probability with which the nodes are held.

        Returns:
            float[batch, k] twice: the probability with which each child is held, and that of its parent hereafter.
        """
        facts = self._facts[self._batch, child]
        token = self._token.gather(1, child).unsqueeze(-1)
        before, mass = self._left.index_select(1, nodes), self._mass.index_select(1, nodes)
        ratio = before.gather(-1, token).squeeze(-1) / mass * facts[..., 0]
        self.ratio.scatter_(1, child, ratio)
        left = before * (held / mass).unsqueeze(-1)
        if self._probs is not None and self._row is not None:
            dist = self._probs[self._batch, self._row.gather(1, child)].to(left.dtype)
            factor = facts[..., 1:2]
            left.addcmul_(dist.masked_fill_(factor == 0, 0.0), factor, value=-1)  # a DELTA node's row may hold NaN
        left.scatter_add_(-1, token, -facts[..., 2:])
        total = left.clamp_(min=0).sum(-1)
        # So little is left only where p is q but for rounding, and then the child is accepted.
        is_left = total > NOTHING
        self._left.index_copy_(1, nodes, torch.where(is_left.unsqueeze(-1), left, before))
        self._mass.index_copy_(1, nodes, torch.where(is_left, total, mass))
        # Without a child: held / (held + 1 - held), that is held.  In this order: total + 1 would round total away.
        return (held * ratio).clamp_(max=1), total / (total + (1 - held)).clamp_(min=TINY)

    def dist_at(self, leaf: Tensor) -> Tensor:
        """Give what is left at int64[batch] nodes: float[batch, vocab], not normalised."""
        return self._left[self._batch.squeeze(1), leaf]


def _facts(tree: TokenTree, siblings: Siblings, draft: DraftProbs | None) -> Tensor:
    """Tell how each node's own distribution looks after its elders: float[batch, n, 3].

    Returns:
        1 / q at the node's token; the factor that makes the stored distribution q, 0 for a DELTA node, whose
        distribution is one-hot; and what q has besides at the token, 1 for a DELTA node.
    """
    if draft is None:
        one_hot = torch.arange(3, device=tree.tokens.device) != 1  # made there: nothing is copied from the host
        return one_hot.float().expand(*tree.tokens.shape, 3)
    row = draft.row.long().clamp(0, draft.probs.shape[1] - 1)
    batch = torch.arange(len(row), device=row.device)[:, None]
    at = draft.probs[batch.unsqueeze(-1), row.unsqueeze(-1), tree.tokens[:, None]].double()  # [batch, node, token]
    is_masked = (
        siblings.is_elder & (draft.kind != INDEPENDENT)[:, :, None]
    )  # elders that the node's distribution is without
    is_again = (is_masked & (tree.tokens[:, :, None] == tree.tokens[:, None])).any(-1)  # an elder's token
    # In float64: of a distribution that its elders use up nearly all still ten digits are known.
    spent = (at * (is_masked & ~is_again[:, None])).sum(-1)
    rest = (draft.probs.sum(-1, dtype=torch.float64).gather(1, row) - spent).clamp(min=TINY)
    own = at.diagonal(dim1=1, dim2=2) * ~is_again
    is_delta = draft.kind == DELTA
    inverse = torch.where(is_delta, 1.0, rest / own.clamp(min=TINY))
    return torch.stack([inverse, torch.where(is_delta, 0.0, 1 / rest), is_delta.double()], -1)
