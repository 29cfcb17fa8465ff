"""Which nodes of a tree the target accepts, and the token that follows: greedy, MATCH and recursive rejection.

In the docstrings p is the target's law and q the draft's.  Every rule works on all nodes at once: whether a node would
be accepted if it were reached does not depend on its siblings' descendants, so a path is accepted where all its nodes
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stree.sampling import Random, Sampling
from stree.tree import TokenTree, checks_everywhere

__all__ = ["DELTA", "SAMPLED", "VERIFIERS", "Acceptance", "DraftLaws", "accept"]

SAMPLED: Final = 0
DELTA: Final = 1
VERIFIERS: Final = ("auto", "match", "rejection")
TINY: Final = 1e-38  # a divisor that keeps 0 / 0 at 0; about the smallest normal float32


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaws:
    """From which law each node was drawn; earlier siblings are masked out of it by the verifier.

    Attributes:
        probs: float[batch, rows, vocab], after every draft-side processor; rows that no node names may hold anything.
        row: int32[batch, n], the row of each node; ignored for the root, padding and DELTA nodes.
        kind: int8[batch, n], SAMPLED or DELTA (chosen without chance: top-k, retrieved).
    """

    probs: Tensor
    row: Tensor
    kind: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The accepted path of each sequence and the token after it.

    The path begins with the root, which was emitted before.  ``next_token`` is the bonus token where the path ends at a
    leaf, else the recovered token: drawn from what the rejected children leave of the target's law.

    Attributes:
        path: int32[batch, m], node indices, padded by -1; m is the host's bound on depth + 1.
        path_lengths: int32[batch], root included.
        next_token: int64[batch].
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor

    @property
    def num_accepted(self) -> Tensor:
        """Drafted nodes accepted: int32[batch]."""
        return self.path_lengths - 1


def accept(
    tree: TokenTree,
    target_logits: Tensor,
    sampling: Sampling,
    rng: Random,
    draft: DraftLaws | None = None,
    verifier: str = "auto",
    max_depth: int | None = None,
) -> Acceptance:
    """Choose the accepted path of each tree so that the emitted text follows the target's law exactly.

    Greedy and MATCH: the target draws its own token at every node, one number a position (a coupling over siblings and
    depths alike), and a child that carries it is accepted; lossless for every tree (field name: naive sampling).
    Rejection: children in draw order against p, each accepted with probability min(1, r(x) / q(x)), after a rejection
    r <- norm(max(r - q, 0)) and q loses x (recursive rejection without replacement: RSD, arXiv 2402.14160; SpecInfer,
    arXiv 2305.09781); a DELTA child has a one-hot q.

    Args:
        tree: n nodes.
        target_logits: float[batch, n, vocab].
        sampling: temperature, top-k, top-p of the target.
        rng: numbers of this step, positioned at the roots.
        draft: laws of the children; None means that all are DELTA.
        verifier: "match", "rejection", or "auto": rejection where laws are given, else match.
        max_depth: bound of the depths known to the host; None reads it, which waits for a device.

    Raises:
        ValueError: shapes disagree, an unknown verifier, or NaN logits (looked for on the CPU).
    """
    batch, n = tree.tokens.shape
    if target_logits.dim() != 3 or target_logits.shape[:2] != (batch, n):
        raise ValueError(f"target_logits must be float[{batch}, {n}, vocab], got {[*target_logits.shape]}")
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    # A maximum is NaN where any logit is: one pass and no copy.
    if (target_logits.device.type == "cpu" or checks_everywhere()) and bool(target_logits.amax().isnan()):
        nodes = (target_logits.isnan().any(-1) & ~tree.is_padding).nonzero().tolist()
        if nodes:
            raise ValueError(f"the target's logits are NaN at (row, node) {nodes[:4]}")
    if max_depth is None:
        max_depth = int(tree.depths.max())
    if sampling.is_greedy or verifier == "match" or (verifier == "auto" and draft is None):
        return _match(tree, target_logits, sampling, rng, max_depth)
    return _reject(tree, sampling.law(target_logits), rng, draft, max_depth)


def _match(tree: TokenTree, target_logits: Tensor, sampling: Sampling, rng: Random, max_depth: int) -> Acceptance:
    """Let the target draw at every node and follow the children that carry what it drew."""
    if sampling.is_greedy:
        drawn = target_logits.argmax(-1)
    else:
        drawn = rng.choice("target", sampling.law(target_logits), tree.depths + 1)
    if tree.tokens.shape[1] == 1:  # plain decoding
        return Acceptance(torch.zeros_like(tree.parents), torch.ones_like(tree.parents[:, 0]), drawn[:, 0])
    parents = tree.parents.clamp(min=0).long()
    is_match = tree.tokens == drawn.gather(1, parents)
    leaf, path, path_lengths = _deepest(tree, is_match, max_depth)
    return Acceptance(path, path_lengths, drawn.gather(1, leaf[:, None]).squeeze(1))


def _reject(tree: TokenTree, target_law: Tensor, rng: Random, draft: DraftLaws | None, max_depth: int) -> Acceptance:
    """Test the children of every node in draw order, all nodes at once, one sibling rank after the other."""
    batch, n = tree.tokens.shape
    rest = target_law
    siblings, max_siblings = _sibling_table(tree)
    index = torch.arange(n, device=tree.tokens.device).expand(batch, n)
    is_kept = torch.zeros(batch, n + 1, dtype=torch.bool, device=tree.tokens.device)
    is_open = torch.ones(batch, n, dtype=torch.bool, device=tree.tokens.device)  # no child accepted so far
    for rank in range(max_siblings):
        nodes = _with_child(siblings, rank)  # [k]
        child = siblings[:, nodes, rank]  # [batch, k], n where a node has no such child
        exists, child = child < n, child.clamp(max=n - 1)
        elder = tree.tokens.gather(1, siblings[:, nodes, :rank].flatten(1).clamp(max=n - 1))
        token, held = tree.tokens.gather(1, child).unsqueeze(-1), rest[:, nodes]
        law = _law_of(draft, child, token, elder.view(*child.shape, rank), held)
        ratio = (held.gather(-1, token) / law.gather(-1, token).clamp(min=TINY)).squeeze(-1).clamp(max=1.0)
        is_tested = exists & is_open[:, nodes]
        accepted = is_tested & rng.bernoulli("accept", ratio * is_tested, torch.zeros_like(child), child)
        is_kept.scatter_(1, torch.where(accepted, child, n), True)
        left = (held - law).clamp_(min=0)
        total = left.sum(-1, keepdim=True)
        # The residual is empty only where p <= q everywhere, that is p == q, and then the child was accepted.
        left = torch.where(exists.unsqueeze(-1) & (total > 0), left / total.clamp(min=TINY), held)
        rest.index_copy_(1, nodes, left)
        is_open[:, nodes] &= ~accepted
    leaf, path, path_lengths = _deepest(tree, is_kept[:, :n] & (index > 0), max_depth)
    last = leaf.view(-1, 1, 1).expand(-1, 1, rest.shape[-1])
    depth = tree.depths.gather(1, leaf[:, None])
    return Acceptance(path, path_lengths, rng.choice("target", rest.gather(1, last), depth + 1).squeeze(1))


def _with_child(siblings: Tensor, rank: int) -> Tensor:
    """List the nodes that may have a child of this rank, int64[k]: all, unless reading which waits for nothing."""
    n = siblings.shape[1]
    if siblings.device.type != "cpu":
        return torch.arange(n, device=siblings.device)
    return (siblings[..., rank] < n).any(0).nonzero().squeeze(1)


def _law_of(draft: DraftLaws | None, child: Tensor, token: Tensor, elder: Tensor, like: Tensor) -> Tensor:
    """Give the law from which each child was drawn after its elder siblings: float[batch, k, vocab].

    Args:
        draft: the laws, or None where all children are DELTA.
        child: int64[batch, k].
        token: int64[batch, k, 1], its token.
        elder: int64[batch, k, rank], tokens of its elder siblings.
        like: float[batch, k, vocab], gives shape and dtype.
    """
    one_hot = torch.zeros_like(like).scatter_(-1, token, 1.0)
    if draft is None:
        return one_hot
    row = draft.row.gather(1, child).long().clamp(0, draft.probs.shape[1] - 1)
    law = draft.probs.take_along_dim(row.unsqueeze(-1), 1).to(like.dtype)
    law = law.scatter(-1, elder, 0.0)
    is_delta = (draft.kind.gather(1, child) == DELTA).unsqueeze(-1)
    return torch.where(is_delta, one_hot, law / law.sum(-1, keepdim=True).clamp(min=TINY))


def _deepest(tree: TokenTree, is_match: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the deepest node whose whole path below the root matches: its index, path and path length."""
    n = tree.tokens.shape[1]
    index = torch.arange(n, device=tree.tokens.device)
    blocked = ~is_match & (index > 0)
    reached = ~(tree.ancestor_mask & blocked[:, None, :]).any(-1)
    # Of equally deep nodes the first is taken: the root before padding, an elder before a sibling of the same token.
    score = torch.where(reached, tree.depths.long() * n + (n - 1 - index), -1)
    leaf = score.argmax(1)
    on_path = tree.ancestor_mask.gather(1, leaf.view(-1, 1, 1).expand(-1, 1, n)).squeeze(1)
    width = min(n, max_depth + 1)
    path = torch.where(on_path, index, n).sort(1).values[:, :width]
    return leaf, torch.where(path < n, path, -1).to(torch.int32), on_path.sum(1, dtype=torch.int32)


def _sibling_table(tree: TokenTree) -> tuple[Tensor, int]:
    """List each node's children in draw order: int64[batch, n, most children], n where there is none."""
    batch, n = tree.tokens.shape
    parents = tree.parents.long()
    is_child = parents[:, None, :] == torch.arange(n, device=parents.device)[:, None]  # [batch, parent, child]
    most = int(is_child.sum(-1).max()) if n > 1 else 0
    index = torch.arange(n, device=parents.device).expand(batch, n, n)
    return torch.where(is_child, index, n).sort(-1).values[..., :most], most
