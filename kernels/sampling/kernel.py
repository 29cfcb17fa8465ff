"""Random numbers, draws and the MATCH walk in Triton: three launches whatever the trees, and no synchronisation.

A program of the first launch reads one block of a vocabulary, a program of the second draws the token of one node, a
program of the third follows one tree.  Sums over a distribution are sums of integers, so the order of summation does
not change them.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.jit import jit
from stree.kernels.sampling.blocks import blocks_of, end_of, first_best, row_of, scores_of, weights_of
from stree.kernels.sampling.reference import TARGET, UNITS, MatchedPath
from stree.kernels.tiles import MAX_NODES, check_limit, padded
from stree.kernels.topology import Topology

__all__ = ["choice", "draw_distinct", "match_accept", "philox_uniform", "uniform_of", "walk"]


@triton.jit
def uniform_of(position, sequence, purpose, node, key):
    """Turn 53 bits of the first two Philox words of a counter under an int64 key into a number in [0, 1)."""
    c2 = (position * 0 + purpose).to(tl.uint32)
    high, low, _, _ = tl.philox_impl(
        position.to(tl.uint32), sequence.to(tl.uint32), c2, node.to(tl.uint32),
        key.to(tl.uint32), (key >> 32).to(tl.uint32),
    )  # fmt: skip
    # Both products are exact, so a fused multiply-add changes nothing.
    return ((high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)) * 1.1102230246251565e-16


@jit(fuses=False, do_not_specialize=["count", "per_key", "purpose"])
def philox_kernel(
    position_ptr, sequence_ptr, node_ptr, key_ptr, out_ptr, count, per_key, purpose, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the number of each counter; grid (blocks of counters)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    position = tl.load(position_ptr + index, inside, 0)
    sequence = tl.load(sequence_ptr + index, inside, 0)
    node = tl.load(node_ptr + index, inside, 0)
    key = tl.load(key_ptr + index // per_key, inside, 0)
    tl.store(out_ptr + index, uniform_of(position, sequence, purpose, node, key), inside)


@jit(
    fuses=False,
    do_not_specialize=["n", "vocab", "blocks", "stride_score_b", "stride_score_n"],
    do_not_specialize_on_alignment=["score_ptr"],
)
def draw_kernel(
    score_ptr, block_ptr, uniform_ptr, depths_ptr, sequences_ptr, positions_ptr, key_ptr, drawn_ptr,
    n, vocab, blocks, stride_score_b, stride_score_n,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Draw one token: the argmax, or by a given number or that of a counter; grid (nodes, batch)."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    score_ptr = row_of(score_ptr + batch * stride_score_b, node, stride_score_n, ALIGNED)
    vocab = end_of(vocab, ALIGNED)
    block = tl.arange(0, BLOCKS)
    sums = tl.load(block_ptr + (batch * n + node) * blocks + block, block < blocks, 0)
    if GREEDY:
        token = first_best(scores_of(score_ptr, sums, block < blocks), sums, vocab)  # of equals the first
    else:
        if uniform_ptr is not None:
            number = tl.load(uniform_ptr + batch * n + node)
        else:
            position = tl.load(positions_ptr + batch) + tl.load(depths_ptr + batch * n + node) + 1
            sequence = tl.load(sequences_ptr + batch)
            number = uniform_of(position, sequence, PURPOSE, position * 0, tl.load(key_ptr + batch))
        total = tl.sum(sums, 0)
        target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        found = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(block < found, sums, 0), 0)
        inside = tl.cumsum(weights_of(score_ptr, found * BLOCK + tl.arange(0, BLOCK), vocab, UNITS), 0)
        token = found * BLOCK + tl.sum((inside + before <= target).to(tl.int32), 0)
    tl.store(drawn_ptr + batch * n + node, tl.minimum(token, vocab - 1).to(tl.int64))


@jit(
    fuses=False,
    do_not_specialize=[
        "rows",
        "count",
        "vocab",
        "blocks",
        "least",
        "stride_dist_b",
        "stride_dist_r",
        "stride_uniform_b",
        "stride_uniform_r",
    ],
    do_not_specialize_on_alignment=["dist_ptr", "uniform_ptr"],
)
def distinct_kernel(
    dist_ptr, block_ptr, uniform_ptr, tokens_ptr, probs_ptr, rows, count, vocab, blocks, least,
    stride_dist_b, stride_dist_r, stride_uniform_b, stride_uniform_r,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Draw tokens of one distribution one after the other, each from what is left of it; grid (rows, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    place = batch * rows + tl.program_id(0)
    dist_ptr = row_of(dist_ptr + batch * stride_dist_b, tl.program_id(0), stride_dist_r, ALIGNED)
    vocab = end_of(vocab, ALIGNED)
    uniform_ptr += batch * stride_uniform_b + tl.program_id(0).to(tl.int64) * stride_uniform_r
    lane = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    order = tl.arange(0, COUNT)
    sums = tl.load(block_ptr + place * blocks + block, block < blocks, 0)  # of the weights that are left
    total = tl.sum(sums, 0)
    crumbs = total.to(tl.float64) * least
    drawn = tl.full((COUNT,), -1, tl.int32)
    for draw in range(0, count):
        number = tl.load(uniform_ptr + draw)
        target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        found = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(block < found, sums, 0), 0)
        index = found * BLOCK + lane
        weights = weights_of(dist_ptr, index, vocab, UNITS)
        for earlier in range(draw):
            weights = tl.where(index == tl.sum(tl.where(order == earlier, drawn, 0), 0), 0, weights)
        inside = tl.sum((tl.cumsum(weights, 0) + before <= target).to(tl.int32), 0)
        token = tl.minimum(found * BLOCK + inside, vocab - 1)
        probs = tl.load(dist_ptr + token)
        share = tl.where(total.to(tl.float64) > crumbs, probs, 0.0)
        tl.store(tokens_ptr + place * count + draw, token.to(tl.int64))
        tl.store(probs_ptr + place * count + draw, share)
        weight = tl.sum(tl.where(lane == inside, weights, 0), 0)
        sums = tl.where(block == found, sums - weight, sums)
        total -= weight
        drawn = tl.where(order == draw, token, drawn)


@triton.jit
def walk(mask_ptr, depths_ptr, blocked, path_ptr, length_ptr, n, width, NODES: tl.constexpr):
    """Write the path to the deepest node of a tree above which none is blocked, itself included; return the node."""
    node = tl.arange(0, NODES)
    inside = node < n
    pairs = inside[:, None] & inside[None, :]
    mask = tl.load(mask_ptr + node[:, None] * n + node[None, :], pairs, 0) != 0
    reached = inside & (tl.max((mask & blocked[None, :]).to(tl.int32), 1) == 0)
    # Of equally deep nodes the first counts: the root before padding, an elder before a sibling of the same token.
    depth = tl.load(depths_ptr + node, inside, 0)
    leaf = n - 1 - tl.max(tl.where(reached, depth * n + n - 1 - node, -1), 0) % n
    on_path = tl.load(mask_ptr + leaf * n + node, inside, 0) != 0
    length = tl.sum(on_path.to(tl.int32), 0)
    place = tl.cumsum(on_path.to(tl.int32), 0) - 1
    tl.store(path_ptr + place, node, on_path & (place < width))
    tl.store(path_ptr + node, node * 0 - 1, (node >= length) & (node < width))
    tl.store(length_ptr, length)
    return leaf


@jit(fuses=False, do_not_specialize=["n", "width"])
def walk_kernel(
    tokens_ptr, parents_ptr, depths_ptr, mask_ptr, drawn_ptr, path_ptr, lengths_ptr, next_ptr, n, width,
    NODES: tl.constexpr,
):  # fmt: skip
    """Find the deepest node each of whose path's tokens was drawn at its parent; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < n
    drawn_ptr += batch * n
    parent = tl.load(parents_ptr + batch * n + node, inside, 0)
    above = tl.load(drawn_ptr + tl.maximum(parent, 0), inside, 0)
    blocked = (tl.load(tokens_ptr + batch * n + node, inside, 0) != above) & (node > 0)
    path_ptr += batch * width
    leaf = walk(
        mask_ptr + batch * n * n, depths_ptr + batch * n, blocked, path_ptr, lengths_ptr + batch, n, width, NODES
    )
    tl.store(next_ptr + batch, tl.load(drawn_ptr + leaf))


def philox_uniform(position: Tensor, sequence: Tensor, node: Tensor, *, seed: int | Tensor, purpose: int) -> Tensor:
    """Compute the uniform numbers of counters; see `stree.kernels.ops`."""
    out = torch.empty(position.shape, dtype=torch.float64, device=position.device)
    count, keys = out.numel(), keys_of(seed, out)
    if count:
        philox_kernel[(-(-count // 128),)](
            position.contiguous(), sequence.contiguous(), node.contiguous(), keys, out, count, count // len(keys),
            purpose, BLOCK=128,
        )  # fmt: skip
    return out


def choice(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index from each distribution; see `stree.kernels.ops`."""
    drawn = _draw("choice", probs.reshape(1, -1, probs.shape[-1]), uniform=uniform.contiguous())
    return drawn.view(uniform.shape)


def draw_distinct(dist: Tensor, uniform: Tensor, *, least: float) -> tuple[Tensor, Tensor]:
    """Draw without replacement from each distribution; see `stree.kernels.ops`."""
    batch, rows, vocab = dist.shape
    count = uniform.shape[2]
    tokens, probs = dist.new_empty(uniform.shape, dtype=torch.int64), dist.new_empty(uniform.shape)
    if count:
        numbers = uniform if uniform.stride(2) == 1 else uniform.contiguous()
        blocks, constants = blocks_of("draw_distinct", dist)
        distinct_kernel[(rows, batch)](
            dist, blocks, numbers, tokens, probs, rows, count, vocab, blocks.shape[2], least,
            *dist.stride()[:2], *numbers.stride()[:2], UNITS=UNITS, **constants, COUNT=padded(count, 1), num_warps=8,
        )  # fmt: skip
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
    """Draw at every node and walk down; see `stree.kernels.ops`."""
    batch, n = tokens.shape
    width = n if max_depth is None else min(n, max_depth + 1)
    check_limit("match_accept", "trees of nodes", n, MAX_NODES)
    depths = topology.depths.contiguous()
    drawn = _draw("match_accept", scores, depths=depths, seed=seed, sequences=sequences, positions=positions)
    path = torch.empty(batch, width, dtype=torch.int32, device=tokens.device)
    lengths, next_token = path.new_empty(batch), drawn.new_empty(batch)
    walk_kernel[(batch,)](
        tokens.contiguous(), topology.parents.contiguous(), depths, topology.mask.contiguous(), drawn,
        path, lengths, next_token, n, width, NODES=padded(n), num_warps=4,
    )  # fmt: skip
    return MatchedPath(path, lengths, next_token)


def _draw(
    op: str,
    scores: Tensor,
    *,
    uniform: Tensor | None = None,
    depths: Tensor | None = None,
    seed: int | Tensor | None = None,
    sequences: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Launch the draw of one token from every row of [batch, n, vocab]; without numbers or a seed, the argmax."""
    batch, n, vocab = scores.shape
    is_greedy = uniform is None and seed is None
    blocks, constants = blocks_of(op, scores, is_greedy=is_greedy)
    drawn = torch.empty(batch, n, dtype=torch.int64, device=scores.device)
    draw_kernel[(n, batch)](
        scores, blocks, uniform, depths,
        None if sequences is None else sequences.contiguous(), None if positions is None else positions.contiguous(),
        None if seed is None else keys_of(seed, drawn), drawn, n, vocab, blocks.shape[2], *scores.stride()[:2],
        GREEDY=is_greedy, PURPOSE=TARGET, UNITS=UNITS, **constants, num_warps=8,
    )  # fmt: skip
    return drawn


def keys_of(seed: int | Tensor, like: Tensor) -> Tensor:
    """Return a seed, or one for every sequence of a tensor [batch, ...], as int64[batch] modulo 2^64."""
    batch = like.shape[:1].numel()
    if isinstance(seed, Tensor):
        return seed.expand(batch).contiguous()
    key = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return torch.full((batch,), key, dtype=torch.int64, device=like.device)
