"""Residual distributions: what rejected children leave of the target's distribution at each node.

p is the target's distribution at a node and q the distribution that its child was drawn from, both after the earlier
siblings. The child's acceptance ratio is p / q at its token; its rejection leaves max(r p - q, 0), normalised, where r
is the probability that the node itself is accepted (1 in recursive rejection). The rules choose the order of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from stree.kernels.dispatch import host_can_read
from stree.kernels.traversal.operands import DELTA, INDEPENDENT, NOTHING, TINY, DraftProbs, Tree
from stree.kernels.traversal.paths import Siblings

__all__ = ["Residuals"]


class Residuals:
    """Residual distribution of every node while its children are tested in draw order.

    Attributes:
        siblings: draw order of the children.
        ratio: float[batch, n + 1], p / q at the token of each tested node; the last column belongs to no node.
    """

    def __init__(self, tree: Tree, target_probs: Tensor, draft: DraftProbs | None) -> None:
        self.siblings = Siblings.of(tree, None if draft is None else draft.max_children)
        self._probs, self._mass = target_probs, torch.ones_like(target_probs[..., 0])  # not normalised, and their sums
        self.ratio = pad(torch.zeros_like(self._mass), (0, 1))
        self._batch = torch.arange(len(target_probs), device=target_probs.device)[:, None]
        self._token = pad(tree.tokens, (0, 1))
        self._draft_probs = None if draft is None else draft.probs
        self._draft_row = None if draft is None else pad(draft.row.long().clamp(0, draft.probs.shape[1] - 1), (0, 1))
        self._draft_terms = pad(_draft_terms(tree, self.siblings, draft).to(target_probs.dtype), (0, 0, 0, 1))

    def waves(self, wave: Tensor, num_waves: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Group tests into waves that run one after the other.

        Args:
            wave: int64[batch, n], the wave of each drafted node; siblings have different ones.
            num_waves: upper bound of them.

        Yields:
            int64[k] nodes and int64[batch, k] the child of each that is tested, n where a row has no such child.
        """
        batch, n = wave.shape
        place = torch.where(self.siblings.is_drafted, wave * n + self.siblings.parents, num_waves * n)
        index = torch.arange(n, device=wave.device)
        child = torch.full((batch, num_waves * n + 1), n, device=wave.device).scatter_(1, place, index.expand(batch, n))
        child = child[:, :-1].view(batch, num_waves, n)
        if not host_can_read(wave):  # all nodes in every wave: choosing some would synchronise
            yield from ((index, child[:, number]) for number in range(num_waves))
            return
        numbers, nodes = (child < n).any(0).nonzero().T
        begin = 0
        for number, count in enumerate(torch.bincount(numbers, minlength=num_waves).tolist()):
            if count:
                chosen = nodes[begin : begin + count]
                yield chosen, child[:, number].index_select(1, chosen)
            begin += count

    def test(self, nodes: Tensor, child: Tensor, accept_prob: Tensor) -> tuple[Tensor, Tensor]:
        """Test a child of some nodes, and replace their distributions by the residual of its rejection.

        Args:
            nodes: int64[k].
            child: int64[batch, k], n for none.
            accept_prob: float[batch, k], probability that the nodes themselves are accepted.

        Returns:
            float[batch, k] twice: the acceptance probability of each child, and that of its parent after a rejection.
        """
        terms = self._draft_terms[self._batch, child]
        token = self._token.gather(1, child).unsqueeze(-1)
        before, mass = self._probs.index_select(1, nodes), self._mass.index_select(1, nodes)
        ratio = before.gather(-1, token).squeeze(-1) / mass * terms[..., 0]
        self.ratio.scatter_(1, child, ratio)
        residual = before * (accept_prob / mass).unsqueeze(-1)
        if self._draft_probs is not None and self._draft_row is not None:
            draft_probs = self._draft_probs[self._batch, self._draft_row.gather(1, child)].to(residual.dtype)
            scale = terms[..., 1:2]
            residual.addcmul_(draft_probs.masked_fill_(scale == 0, 0.0), scale, value=-1)  # a DELTA row may hold NaN
        residual.scatter_add_(-1, token, -terms[..., 2:])
        total = residual.clamp_(min=0).sum(-1)
        # Only rounding is left where p equals q, and then the child is accepted.
        is_left = total > NOTHING
        self._probs.index_copy_(1, nodes, torch.where(is_left.unsqueeze(-1), residual, before))
        self._mass.index_copy_(1, nodes, torch.where(is_left, total, mass))
        # For a row without a child this is accept_prob / (accept_prob + 1 - accept_prob).  The order of the sum
        # matters: total + 1 would round total away.
        return (accept_prob * ratio).clamp_(max=1), total / (total + (1 - accept_prob)).clamp_(min=TINY)

    @property
    def left(self) -> Tensor:
        """The residual distributions of all nodes: float[batch, n, vocab], not normalised."""
        return self._probs

    def at(self, node: Tensor) -> Tensor:
        """Return the residual distributions of int64[batch] nodes: float[batch, vocab], not normalised."""
        return self._probs[self._batch.squeeze(1), node]


def _draft_terms(tree: Tree, siblings: Siblings, draft: DraftProbs | None) -> Tensor:
    """Describe the distribution q that each node was drawn from, earlier siblings masked out: float[batch, n, 3].

    Returns:
        1 / q at the node's token; the factor that turns the stored distribution into q, 0 for a DELTA node; and the
        mass of a DELTA node's one-hot q at its token, 0 for other nodes.
    """
    if draft is None:
        is_one_hot = torch.arange(3, device=tree.tokens.device) != 1  # made on the device: no copy from the host
        return is_one_hot.float().expand(*tree.tokens.shape, 3)
    row = draft.row.long().clamp(0, draft.probs.shape[1] - 1)
    batch = torch.arange(len(row), device=row.device)[:, None]
    at = draft.probs[batch.unsqueeze(-1), row.unsqueeze(-1), tree.tokens[:, None]].double()  # [batch, node, token]
    is_masked = siblings.is_earlier & (draft.kind != INDEPENDENT)[:, :, None]
    is_repeated = (is_masked & (tree.tokens[:, :, None] == tree.tokens[:, None])).any(-1)  # an earlier sibling's token
    # In float64, so that ten digits are left of a distribution that earlier siblings almost use up.
    masked = (at * (is_masked & ~is_repeated[:, None])).sum(-1)
    rest = (draft.probs.sum(-1, dtype=torch.float64).gather(1, row) - masked).clamp(min=TINY)
    own = at.diagonal(dim1=1, dim2=2) * ~is_repeated
    is_delta = draft.kind == DELTA
    inverse = torch.where(is_delta, 1.0, rest / own.clamp(min=TINY))
    return torch.stack([inverse, torch.where(is_delta, 0.0, 1 / rest), is_delta.double()], -1)
