"""Greedy decoding and MATCH: the target draws its own tokens, and children that carry them are accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify.paths import deepest
from stree.verify.values import Acceptance

__all__ = ["match"]


def match(tree: TokenTree, target_logits: Tensor, sampling: Sampling, rng: Random, max_depth: int) -> Acceptance:
    """Let the target draw at every node, one number a position, and follow the children that carry what it drew.

    The draws are coupled over siblings and depths alike; lossless for every tree (field name: naive sampling).
    """
    if sampling.is_greedy:
        drawn = target_logits.argmax(-1)
    else:
        drawn = rng.choice("target", sampling.law(target_logits), tree.depths + 1)
    if tree.tokens.shape[1] == 1:  # plain decoding
        return Acceptance(torch.zeros_like(tree.parents), torch.ones_like(tree.parents[:, 0]), drawn[:, 0])
    parents = tree.parents.clamp(min=0).long()
    is_match = tree.tokens == drawn.gather(1, parents)
    leaf, path, path_lengths = deepest(tree, is_match, max_depth)
    return Acceptance(path, path_lengths, drawn.gather(1, leaf[:, None]).squeeze(1))
