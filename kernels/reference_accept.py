"""Random numbers, draws and the MATCH walk in plain torch: what `accept.py` does in Triton, bit for bit.

`stree.kernels.accept_door` documents arguments and checks them.  No function reads the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.topology import Topology

__all__ = ["TARGET", "UNITS", "choice", "draw_distinct", "match_accept", "philox_uniform"]

TARGET = 0  # purpose of the numbers of the target's own tokens
UNITS = 2.0**60  # of a weight of one: weights that sum to at most 4 stay below 2^63
_WORD = 0xFFFFFFFF


def philox_uniform(position: Tensor, sequence: Tensor, node: Tensor, *, seed: int | Tensor, purpose: int) -> Tensor:
    """Run ten rounds of Philox 4x32 and make 53 bits of its first two words a number in [0, 1)."""
    c0, c1, c3 = position & _WORD, sequence & _WORD, node & _WORD
    c2 = torch.full_like(c0, purpose)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64, of which every bit is used
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return ((c0 >> 5) * (1 << 26) + (c1 >> 6)).double() * 2.0**-53


def choice(dist: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index a row by inversion of sums of integers, which no order of summation changes."""
    cumulative = (dist.double() * UNITS + 0.5).long().cumsum(-1)
    total = cumulative[..., -1:]
    target = torch.minimum((uniform.unsqueeze(-1) * total.double()).long(), total - 1)
    return (cumulative <= target).sum(-1).clamp_(max=dist.shape[-1] - 1)


def draw_distinct(dist: Tensor, uniform: Tensor, *, least: float) -> tuple[Tensor, Tensor]:
    """Draw one index after the other, each by ``choice`` from the weights that the earlier ones leave."""
    weights = (dist.double() * UNITS + 0.5).long()
    crumbs = weights.sum(-1, keepdim=True).double() * least
    tokens, probs = torch.empty_like(uniform, dtype=torch.long), torch.empty_like(uniform, dtype=dist.dtype)
    for place in range(uniform.shape[-1]):
        cumulative = weights.cumsum(-1)
        total = cumulative[..., -1:]
        target = torch.minimum((uniform[..., place, None] * total.double()).long(), total - 1)
        token = (cumulative <= target).sum(-1, keepdim=True).clamp_(max=dist.shape[-1] - 1)
        tokens[..., place] = token.squeeze(-1)
        probs[..., place] = (dist.gather(-1, token) * (total > crumbs)).squeeze(-1)
        weights.scatter_(-1, token, 0)
    return tokens, probs


def match_accept(
    tokens: Tensor,
    parents: Tensor | Topology,
    scores: Tensor,
    *,
    width: int,
    seed: int | Tensor | None,
    sequences: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the target's token at every node and follow the children that carry it, as far down as they go."""
    topology = Topology.cast(parents)
    batch, n = tokens.shape
    if seed is None:
        drawn = scores.argmax(-1)
    else:
        assert sequences is not None and positions is not None, "draws need sequences and positions"
        position = positions[:, None] + topology.depths + 1
        sequence = sequences[:, None].expand_as(position)
        uniform = philox_uniform(position, sequence, torch.zeros_like(position), seed=seed, purpose=TARGET)
        drawn = choice(scores, uniform)
    node = torch.arange(n, device=tokens.device)
    fits = (tokens == drawn.gather(1, topology.parents.clamp(min=0).long())) | (node == 0)
    reached = (topology.hidden | fits[:, None]).all(-1)
    # Of equally deep nodes the first counts: the root before padding, an elder before a sibling of the same token.
    rank = torch.where(reached, topology.depths * n + (n - 1 - node), -1)
    leaf = rank.argmax(1)
    row = torch.arange(batch, device=tokens.device)
    on_path = topology.mask[row, leaf]
    path = torch.where(on_path, node, n).sort(1).values[:, :width]
    return torch.where(path < n, path, -1).int(), on_path.sum(1, dtype=torch.int32), drawn[row, leaf]
