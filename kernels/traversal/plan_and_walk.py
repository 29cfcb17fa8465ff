"""Triton code around the tests of `stree.kernels.traversal.node_tests`: their order, the walk, the next token."""

# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.jit import jit
from stree.kernels.sampling.blocks import end_of, row_of
from stree.kernels.sampling.kernel import uniform_of, walk
from stree.kernels.traversal.node_tests import (
    AFTER,
    AT,
    BELOW,
    BESIDES,
    COUNT,
    FACTOR,
    FIRST,
    HELD,
    INVERSE,
    LISTED,
    MASS,
    NOTHING,
    OWN,
    PARENT,
    PLAN_ROWS,
    RANK,
    RATIO,
    ROW,
    SCALE,
    STATE_ROWS,
    TOKEN,
    WHEN,
    left_of,
    pass_prob,
    sum_parts,
)


@jit(fuses=False, do_not_specialize=["vocab", "stride_b", "stride_r"], do_not_specialize_on_alignment=["probs_ptr"])
def sums_kernel(
    probs_ptr, sums_ptr, vocab, stride_b, stride_r, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Add up a block of a stored distribution in float64; grid (blocks, rows, batch)."""
    block, row, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, vocab = block * BLOCK + tl.arange(0, BLOCK), end_of(vocab, ALIGNED)
    probs = tl.load(row_of(probs_ptr + batch * stride_b, row, stride_r, ALIGNED) + index, index < vocab, 0.0)
    place = (batch * tl.num_programs(1) + row) * tl.num_programs(0) + block
    tl.store(sums_ptr + place, tl.sum(probs.to(tl.float64), 0))


@jit(
    fuses=False,
    do_not_specialize=["n", "rows", "blocks", "stride_dist_b", "stride_dist_n", "stride_b", "stride_r"],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "parents_ptr",
        "mask_ptr",
        "dist_ptr",
        "probs_ptr",
        "row_ptr",
        "kind_ptr",
    ],
)
def plan_kernel(
    tokens_ptr, parents_ptr, mask_ptr, dist_ptr, probs_ptr, row_ptr, kind_ptr, sums_ptr, plan_ptr, state_ptr,
    n, rows, blocks, stride_dist_b, stride_dist_n, stride_b, stride_r,
    DELTA: tl.constexpr, INDEPENDENT: tl.constexpr, NODES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Order the tests of a tree, and compute how each node's own distribution looks after its elders; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < n
    parent = tl.load(parents_ptr + batch * n + node, inside, -1)
    token = tl.load(tokens_ptr + batch * n + node, inside, 0).to(tl.int32)
    is_drafted = parent >= 0
    above = tl.maximum(parent, 0)
    rank, first, own, count, again, when = node * 0, node * 0, node * 0, node * 0, node * 0, node * 0
    for start in range(0, n, PARTS):  # some columns at a time: all pairs would spill
        column = start + tl.arange(0, PARTS)
        theirs = tl.gather(parent, column, 0)[None, :]
        is_elder = (parent[:, None] == theirs) & (node[:, None] > column[None, :])
        rank += tl.sum(is_elder.to(tl.int32), 1)
        again += tl.sum((is_elder & (token[:, None] == tl.gather(token, column, 0)[None, :])).to(tl.int32), 1)
        first += tl.sum(((theirs >= 0) & (theirs < above[:, None])).to(tl.int32), 1)
        own += tl.sum(((theirs >= 0) & (theirs < node[:, None])).to(tl.int32), 1)
        count += tl.sum((theirs == node[:, None]).to(tl.int32), 1)
    rank = tl.where(is_drafted, rank, 0)
    for start in range(0, n, PARTS):
        column = start + tl.arange(0, PARTS)
        pairs = inside[:, None] & (column < n)[None, :]
        is_above = tl.load(mask_ptr + batch * n * n + node[:, None] * n + column[None, :], pairs, 0) != 0
        when += tl.sum(tl.where(is_above, tl.gather(rank, column, 0)[None, :], 0), 1)
    when = tl.where(is_drafted, when, -2)
    plan_ptr += batch * PLAN_ROWS * NODES
    state_ptr += batch * STATE_ROWS * NODES
    row = node * 0
    inverse, factor, besides = node * 0.0 + 1.0, node * 0.0, node * 0.0 + 1.0
    if probs_ptr is not None:
        row = tl.load(row_ptr + batch * n + node, inside, 0)
        row = tl.minimum(tl.maximum(row, 0), rows - 1)
        kind = tl.load(kind_ptr + batch * n + node, inside, DELTA)
        is_drawn = is_drafted & (kind != DELTA)
        is_without = is_drawn & (kind != INDEPENDENT)  # without the tokens of its elders
        probs_ptr_of = probs_ptr + batch * stride_b + row.to(tl.int64) * stride_r
        again = tl.where(kind != INDEPENDENT, again, 0)
        name = tl.where(again > 0, -1, parent)  # of the siblings of one token only the eldest counts
        spent = tl.zeros((NODES,), tl.float64)
        for start in range(0, n, PARTS):
            column = start + tl.arange(0, PARTS)
            named, word = tl.gather(name, column, 0), tl.gather(token, column, 0)
            is_spent = (parent[:, None] == named[None, :]) & (node[:, None] > column[None, :]) & is_without[:, None]
            spent += tl.sum(tl.load(probs_ptr_of[:, None] + word[None, :], is_spent, 0.0).to(tl.float64), 1)
        # In float64: of a distribution that its elders use up nearly all ten digits are left.
        whole = sum_parts(sums_ptr + batch * rows * blocks, row, is_drawn, blocks, PARTS, tl.float64)
        rest = tl.maximum(whole - spent, 1e-38)
        share = tl.load(probs_ptr_of + token, is_drawn & (again == 0), 0.0).to(tl.float64)
        inverse = tl.where(is_drawn, (rest / tl.maximum(share, 1e-38)).to(tl.float32), 1.0)
        factor = tl.where(is_drawn, (1.0 / rest).to(tl.float32), 0.0)
        besides = tl.where(is_drawn, 0.0, 1.0)
    dist_ptr += batch * stride_dist_b
    at_token = tl.load(dist_ptr + above.to(tl.int64) * stride_dist_n + token, is_drafted, 0.0).to(tl.float32)
    tl.store(plan_ptr + WHEN * NODES + node, when)
    tl.store(plan_ptr + RANK * NODES + node, rank)
    tl.store(plan_ptr + PARENT * NODES + node, above)
    tl.store(plan_ptr + FIRST * NODES + node, first)
    tl.store(plan_ptr + OWN * NODES + node, own)
    tl.store(plan_ptr + COUNT * NODES + node, count)
    tl.store(plan_ptr + ROW * NODES + node, row)
    tl.store(plan_ptr + TOKEN * NODES + node, token)
    tl.store(plan_ptr + LISTED * NODES + first + rank, node, is_drafted)
    tl.store(state_ptr + INVERSE * NODES + node, inverse)
    tl.store(state_ptr + FACTOR * NODES + node, factor)
    tl.store(state_ptr + BESIDES * NODES + node, besides)
    tl.store(state_ptr + SCALE * NODES + node, node * 0.0)
    tl.store(state_ptr + AT * NODES + node, at_token)
    tl.store(state_ptr + HELD * NODES + node, node * 0.0 + 1.0)
    tl.store(state_ptr + MASS * NODES + node, node * 0.0 + 1.0)
    tl.store(state_ptr + BELOW * NODES + node, node * 0.0 + 1.0)
    tl.store(state_ptr + RATIO * NODES + node, node * 0.0)


@jit(
    fuses=False,
    do_not_specialize=["n", "width", "blocks"],
    do_not_specialize_on_alignment=["mask_ptr", "depths_ptr", "sequences_ptr", "positions_ptr", "key_ptr"],
)
def toss_kernel(
    mask_ptr, depths_ptr, sequences_ptr, positions_ptr, key_ptr, plan_ptr, state_ptr, parts_ptr,
    accept_ptr, ratio_ptr, path_ptr, lengths_ptr, leaf_ptr, n, width, blocks,
    PURPOSE: tl.constexpr, NODES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Settle the last tests, draw which nodes pass, and walk down to the first in post-order; grid (batch).

    That is the node which is reached by going, from the root on, to the eldest child below which a node passes.
    """
    batch = tl.program_id(0).to(tl.int64)
    plan_ptr += batch * PLAN_ROWS * NODES
    state_ptr += batch * STATE_ROWS * NODES
    node = tl.arange(0, NODES)
    inside = node < n
    is_drafted = tl.load(plan_ptr + WHEN * NODES + node) >= 0
    total = sum_parts(parts_ptr + batch * NODES * blocks, node, is_drafted, blocks, PARTS, tl.float32)
    stays = is_drafted & (total <= NOTHING)
    tl.store(state_ptr + SCALE * NODES + node, node * 0.0 + 1.0, stays)
    tl.store(state_ptr + FACTOR * NODES + node, node * 0.0, stays)
    tl.store(state_ptr + BESIDES * NODES + node, node * 0.0, stays)
    count = tl.load(plan_ptr + COUNT * NODES + node)
    has_child = count > 0
    own = tl.load(plan_ptr + OWN * NODES + node)
    youngest = tl.load(plan_ptr + LISTED * NODES + own + count - 1, has_child, 0)
    left = tl.gather(total, youngest, 0)
    mass, held = tl.load(state_ptr + MASS * NODES + youngest), tl.load(state_ptr + HELD * NODES + youngest)
    after = tl.where(has_child, tl.where(left > NOTHING, left, mass), 1.0)
    tl.store(state_ptr + AFTER * NODES + node, after)
    prob = tl.where(has_child, pass_prob(left, held), tl.load(state_ptr + BELOW * NODES + node))
    tl.store(accept_ptr + batch * n + node, prob, inside)
    tl.store(ratio_ptr + batch * n + node, tl.minimum(tl.load(state_ptr + RATIO * NODES + node), 1.0), inside)
    position = tl.load(positions_ptr + batch) + node * 0
    sequence = tl.load(sequences_ptr + batch)
    drafted = tl.cumsum(is_drafted.to(tl.int64), 0)  # number of a node without padding, of which batches differ
    number = uniform_of(position, sequence + node * 0, PURPOSE, drafted, tl.load(key_ptr + batch))
    passes = is_drafted & (number < prob.to(tl.float64))
    mask_ptr += batch * n * n
    alive, alive_elders = node * 0, node * 0
    for start in range(0, n, PARTS):
        column = start + tl.arange(0, PARTS)
        pairs = inside[:, None] & (column < n)[None, :]
        is_below = tl.load(mask_ptr + column[None, :] * n + node[:, None], pairs, 0) != 0
        alive += tl.sum(tl.where(is_below, tl.gather(passes.to(tl.int32), column, 0)[None, :], 0), 1)
    name = tl.where(is_drafted, tl.load(plan_ptr + PARENT * NODES + node), -1)
    for start in range(0, n, PARTS):
        column = start + tl.arange(0, PARTS)
        theirs = tl.gather(tl.where(alive > 0, name, -1), column, 0)[None, :]
        is_elder = is_drafted[:, None] & (name[:, None] == theirs) & (node[:, None] > column[None, :])
        alive_elders += tl.sum(is_elder.to(tl.int32), 1)
    blocked = ((alive == 0) | (alive_elders > 0)) & (node > 0)
    leaf = walk(
        mask_ptr, depths_ptr + batch * n, blocked, path_ptr + batch * width, lengths_ptr + batch, n, width, NODES
    )
    tl.store(leaf_ptr + batch, leaf)


@triton.jit
def _leaf_weights(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, leaf_ptr, batch, index, vocab, stride_dist_b, stride_dist_n, stride_b,
    stride_r, NODES: tl.constexpr, UNITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute what is left at a sequence's leaf, normalised, as integers."""
    dist_ptr += batch * stride_dist_b
    plan_ptr += batch * PLAN_ROWS * NODES
    state_ptr += batch * STATE_ROWS * NODES
    leaf = tl.load(leaf_ptr + batch)
    own_ptr = probs_ptr
    if probs_ptr is not None:
        own_ptr = probs_ptr + batch * stride_b
    left = left_of(
        dist_ptr, own_ptr, plan_ptr, state_ptr, leaf, tl.load(plan_ptr + OWN * NODES + leaf),
        tl.load(plan_ptr + COUNT * NODES + leaf), index, vocab, stride_dist_n, stride_r, NODES, ALIGNED,
    )  # fmt: skip
    probs = left.to(tl.float64) / tl.load(state_ptr + AFTER * NODES + leaf).to(tl.float64)
    return (probs * UNITS + 0.5).to(tl.int64)


@jit(
    fuses=False,
    do_not_specialize=["vocab", "stride_dist_b", "stride_dist_n", "stride_b", "stride_r"],
    do_not_specialize_on_alignment=["dist_ptr", "probs_ptr"],
)
def leaf_kernel(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, leaf_ptr, sums_ptr, vocab, stride_dist_b, stride_dist_n, stride_b,
    stride_r,
    NODES: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum a block of what is left at the leaf, as integers; grid (blocks, batch)."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    weight = _leaf_weights(
        dist_ptr, probs_ptr, plan_ptr, state_ptr, leaf_ptr, batch, block * BLOCK + tl.arange(0, BLOCK), vocab,
        stride_dist_b, stride_dist_n, stride_b, stride_r, NODES, UNITS, ALIGNED,
    )  # fmt: skip
    tl.store(sums_ptr + batch * tl.num_programs(0) + block, tl.sum(weight, 0))


@jit(
    fuses=False,
    do_not_specialize=["vocab", "blocks", "stride_dist_b", "stride_dist_n", "stride_b", "stride_r"],
    do_not_specialize_on_alignment=["dist_ptr", "probs_ptr", "sequences_ptr", "positions_ptr", "key_ptr"],
)
def next_kernel(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, leaf_ptr, sums_ptr, lengths_ptr, sequences_ptr, positions_ptr, key_ptr,
    next_ptr, vocab, blocks, stride_dist_b, stride_dist_n, stride_b, stride_r,
    PURPOSE: tl.constexpr, NODES: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Draw the next token from what is left at the leaf, by the number of its position; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + batch) + tl.load(lengths_ptr + batch)  # depth + 1 is the length of the path
    number = uniform_of(position, tl.load(sequences_ptr + batch), PURPOSE, position * 0, tl.load(key_ptr + batch))
    block = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + batch * blocks + block, block < blocks, 0)
    total = tl.sum(sums, 0)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    found = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(block < found, sums, 0), 0)
    weight = _leaf_weights(
        dist_ptr, probs_ptr, plan_ptr, state_ptr, leaf_ptr, batch, found * BLOCK + tl.arange(0, BLOCK), vocab,
        stride_dist_b, stride_dist_n, stride_b, stride_r, NODES, UNITS, ALIGNED,
    )  # fmt: skip
    token = found * BLOCK + tl.sum((tl.cumsum(weight, 0) + before <= target).to(tl.int32), 0)
    tl.store(next_ptr + batch, tl.minimum(token, vocab - 1).to(tl.int64))
