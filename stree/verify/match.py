"""Greedy verification and MATCH: the target samples its own token at every node, and equal children are accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import draws_in_kernels
from stree.kernels.ops import Backend, match_accept
from stree.kernels.topology import Topology
from stree.kernels.traversal.paths import deepest
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify.values import Acceptance

__all__ = ["match", "match_by_kernels"]


def match(tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, max_depth: int) -> Acceptance:
    """Sample the target's token at every node and follow the children that carry it.

    All nodes of one position share one random number, the number that plain sampling uses there, so the text is that of
    plain sampling with the same seed. Lossless for every tree ("naive sampling" in SpecInfer, arXiv 2305.09781).
    """
    if type(rng) is Random and draws_in_kernels(target_logits):  # a subclass draws its own numbers
        return match_by_kernels(tree, target_logits, sampling, rng, max_depth)
    if sampling.is_greedy:
        drawn = target_logits.argmax(-1)
    else:
        drawn = rng.choice("target", sampling.probs(target_logits), tree.depths + 1)
    if tree.tokens.shape[1] == 1:  # plain decoding
        return Acceptance(torch.zeros_like(tree.parents), torch.ones_like(tree.parents[:, 0]), drawn[:, 0])
    parents = tree.parents.clamp(min=0).long()
    is_match = tree.tokens == drawn.gather(1, parents)
    path, path_lengths, leaf = deepest(tree, is_match, max_depth)
    return Acceptance(path, path_lengths, drawn.gather(1, leaf[:, None]).squeeze(1))


def match_by_kernels(
    tree: TokenTree,
    target_logits: Tensor,
    sampling: AnySampling,
    rng: Random,
    max_depth: int,
    backend: Backend = "auto",
) -> Acceptance:
    """Run MATCH in two kernel launches; probabilities are summed as integers (`stree.kernels.ops`)."""
    topology = Topology.of(tree.parents, mask=tree.ancestor_mask, depths=tree.depths)
    if sampling.is_greedy:
        found = match_accept(tree.tokens, topology, target_logits, max_depth=max_depth, backend=backend)
    else:
        found = match_accept(
            tree.tokens, topology, sampling.probs(target_logits), max_depth=max_depth, seed=rng.seed,
            sequences=rng.sequences.long(), positions=rng.positions.long(), backend=backend,
        )  # fmt: skip
    return Acceptance(found.path, found.path_lengths, found.next_token)
