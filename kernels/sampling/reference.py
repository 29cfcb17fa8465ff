"""Softmax, random numbers, draws and the MATCH walk in plain torch: the specification of the Triton versions.

Random numbers, draws and the walk agree with Triton bit for bit.  No function reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.topology import Topology

__all__ = ["TARGET", "UNITS", "MatchedPath", "choice", "draw_distinct", "match_accept", "philox_uniform", "probs"]

TARGET = 0  # purpose of the numbers of the target's own tokens
UNITS = 2.0**60  # of a weight of one: weights that sum to at most 4 stay below 2^63
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class MatchedPath:
    """The accepted path of each sequence and the token after it.

    Attributes:
        path: int32[b, m], nodes from the root down, padded by -1.
        path_lengths: int32[b], root included.
        next_token: int64[b], what was drawn at the last node of the path.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor


def probs(logits: Tensor, temperature: float | Tensor = 1.0, out: Tensor | None = None) -> Tensor:
    """Turn logits into probabilities; see `stree.kernels.sampling.softmax`.

    Logits are divided first, so what counts are differences of quotients rounded to float32.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype).view(-1, *(1,) * (logits.dim() - 1))
    if isinstance(temperature, Tensor) or temperature != 1:
        logits = torch.div(logits, temperature, out=out)
        if out is None and logits.device.type == "cpu":
            out = logits  # a tensor of our own
    return torch.softmax(logits, -1, out=out)


def philox_uniform(position: Tensor, sequence: Tensor, node: Tensor, *, seed: int | Tensor, purpose: int) -> Tensor:
    """Run ten rounds of Philox 4x32 and turn 53 bits of its first two words into a number in [0, 1)."""
    if isinstance(seed, Tensor) and seed.dim():
        seed = seed.view(-1, *(1,) * (position.dim() - 1))
    c0, c1, c3 = position & _WORD, sequence & _WORD, node & _WORD
    c2 = torch.full_like(c0, purpose)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64, of which every bit is used
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return ((c0 >> 5) * (1 << 26) + (c1 >> 6)).double() * 2.0**-53


def choice(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index a row by inversion of sums of integers, which no order of summation changes."""
    cumulative = (probs.double() * UNITS + 0.5).long().cumsum(-1)
    total = cumulative[..., -1:]
    target = torch.minimum((uniform.unsqueeze(-1) * total.double()).long(), total - 1)
    return (cumulative <= target).sum(-1).clamp_(max=probs.shape[-1] - 1)


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
    topology: Topology,
    scores: Tensor,
    *,
    max_depth: int | None,
    seed: int | Tensor | None,
    sequences: Tensor | None,
    positions: Tensor | None,
) -> MatchedPath:
    """Draw the target's token at every node and follow the children that carry it, as far down as they go."""
    batch, n = tokens.shape
    width = n if max_depth is None else min(n, max_depth + 1)
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
    path = torch.where(path < n, path, -1).int()
    return MatchedPath(path, on_path.sum(1, dtype=torch.int32), drawn[row, leaf])
