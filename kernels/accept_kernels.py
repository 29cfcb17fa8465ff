"""Triton code of random numbers, draws and the MATCH walk; `stree.kernels.accept` launches it."""

# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform_of(position, sequence, purpose, node, key):
    """Make 53 bits of the first two Philox words of a counter under an int64 key a number in [0, 1)."""
    c2 = (position * 0 + purpose).to(tl.uint32)
    high, low, _, _ = tl.philox_impl(
        position.to(tl.uint32), sequence.to(tl.uint32), c2, node.to(tl.uint32),
        key.to(tl.uint32), (key >> 32).to(tl.uint32),
    )  # fmt: skip
    # Both products are exact, so a fused multiply-add changes nothing.
    return ((high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["count", "purpose"])
def philox_kernel(
    position_ptr, sequence_ptr, node_ptr, key_ptr, out_ptr, count, purpose, BLOCK: tl.constexpr
):  # fmt: skip
    """Give the number of each counter; grid (blocks of counters)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    position = tl.load(position_ptr + index, inside, 0)
    sequence = tl.load(sequence_ptr + index, inside, 0)
    node = tl.load(node_ptr + index, inside, 0)
    tl.store(out_ptr + index, uniform_of(position, sequence, purpose, node, tl.load(key_ptr)), inside)


@triton.jit
def _weights(dist_ptr, index, vocab, UNITS: tl.constexpr):
    """Load weights of a distribution as integers; the product is exact, so a fused multiply-add changes nothing."""
    probs = tl.load(dist_ptr + index, index < vocab, 0.0).to(tl.float64)
    return (probs * UNITS + 0.5).to(tl.int64)


@triton.jit(
    do_not_specialize=["n", "vocab", "stride_score_b", "stride_score_n"],
    do_not_specialize_on_alignment=["score_ptr"],
)
def draw_kernel(
    score_ptr, uniform_ptr, depths_ptr, sequences_ptr, positions_ptr, key_ptr, drawn_ptr,
    n, vocab, stride_score_b, stride_score_n,
    GREEDY: tl.constexpr, PURPOSE: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Draw one token: the argmax, or by a given number or that of a counter; grid (nodes, batch)."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    score_ptr += batch * stride_score_b + node * stride_score_n
    if ALIGNED:  # said once for every tree: with strides of n rows Triton would build anew for n = 16, 32, ...
        score_ptr = tl.multiple_of(score_ptr, 16)
    lane = tl.arange(0, BLOCK)
    if GREEDY:
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        where = lane
        for start in range(0, vocab, BLOCK):
            score = tl.load(score_ptr + start + lane, start + lane < vocab, float("-inf")).to(tl.float32)
            where = tl.where(score > best, start + lane, where)
            best = tl.maximum(best, score)
        token = tl.min(tl.where(best == tl.max(best, 0), where, vocab), 0)  # of equals the first
    else:
        if uniform_ptr is not None:
            number = tl.load(uniform_ptr + batch * n + node)
        else:
            position = tl.load(positions_ptr + batch) + tl.load(depths_ptr + batch * n + node) + 1
            sequence = tl.load(sequences_ptr + batch)
            number = uniform_of(position, sequence, PURPOSE, position * 0, tl.load(key_ptr))
        block = tl.arange(0, BLOCKS)
        sums = tl.zeros((BLOCKS,), tl.int64)
        for start in range(0, vocab, BLOCK):
            part = tl.sum(_weights(score_ptr, start + lane, vocab, UNITS), 0)
            sums = tl.where(block == start // BLOCK, part, sums)
        total = tl.sum(sums, 0)
        target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        found = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(block < found, sums, 0), 0)
        inside = tl.cumsum(_weights(score_ptr, found * BLOCK + lane, vocab, UNITS), 0)
        token = found * BLOCK + tl.sum((inside + before <= target).to(tl.int32), 0)
    tl.store(drawn_ptr + batch * n + node, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "rows",
        "count",
        "vocab",
        "least",
        "stride_law_b",
        "stride_law_r",
        "stride_uniform_b",
        "stride_uniform_r",
    ],
    do_not_specialize_on_alignment=["law_ptr", "uniform_ptr"],
)
def distinct_kernel(
    dist_ptr, uniform_ptr, tokens_ptr, probs_ptr, rows, count, vocab, least,
    stride_probs_b, stride_probs_r, stride_uniform_b, stride_uniform_r,
    UNITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Draw tokens of one distribution one after the other, each from what is left of it; grid (rows, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    place = batch * rows + tl.program_id(0)
    dist_ptr += batch * stride_probs_b + tl.program_id(0).to(tl.int64) * stride_probs_r
    uniform_ptr += batch * stride_uniform_b + tl.program_id(0).to(tl.int64) * stride_uniform_r
    if ALIGNED:
        dist_ptr = tl.multiple_of(dist_ptr, 16)
    lane = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    order = tl.arange(0, COUNT)
    sums = tl.zeros((BLOCKS,), tl.int64)  # of the weights that are left, by block
    for start in range(0, vocab, BLOCK):
        part = tl.sum(_weights(dist_ptr, start + lane, vocab, UNITS), 0)
        sums = tl.where(block == start // BLOCK, part, sums)
    total = tl.sum(sums, 0)
    crumbs = total.to(tl.float64) * least
    drawn = tl.full((COUNT,), -1, tl.int64)
    for draw in range(0, count):
        number = tl.load(uniform_ptr + draw)
        target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
        found = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
        before = tl.sum(tl.where(block < found, sums, 0), 0)
        index = found * BLOCK + lane
        is_gone = tl.max((index[:, None] == drawn[None, :]).to(tl.int32), 1) != 0
        weights = tl.where(is_gone, 0, _weights(dist_ptr, index, vocab, UNITS))
        inside = tl.sum((tl.cumsum(weights, 0) + before <= target).to(tl.int32), 0)
        token = tl.minimum(found * BLOCK + inside, vocab - 1)
        probs = tl.load(dist_ptr + token)
        share = tl.where(total.to(tl.float64) > crumbs, probs, 0.0)
        tl.store(tokens_ptr + place * count + draw, token.to(tl.int64))
        tl.store(probs_ptr + place * count + draw, share)
        weight = tl.sum(tl.where(lane == inside, weights, 0), 0)
        sums = tl.where(block == found, sums - weight, sums)
        total -= weight
        drawn = tl.where(order == draw, token.to(tl.int64), drawn)


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


@triton.jit(do_not_specialize=["n", "width"])
def walk_kernel(
    tokens_ptr, parents_ptr, depths_ptr, mask_ptr, drawn_ptr, path_ptr, lengths_ptr, next_ptr, n, width,
    NODES: tl.constexpr,
):  # fmt: skip
    """Find the deepest node whose path carries what was drawn above each of its nodes; grid (batch)."""
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
