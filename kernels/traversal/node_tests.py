"""Triton code of the tests of traversal verification, and the layout of its tables; launched by `kernel.py`.

What a test needs of the distribution that is left at a node is computed anew from the target's distribution, child by
child: no program writes a row of a vocabulary.
"""

# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.jit import jit
from stree.kernels.sampling.blocks import end_of, row_of

# Rows of int32 a sequence, one entry a node.
WHEN = tl.constexpr(0)  # wave of a drafted node's test, -2 of others
RANK = tl.constexpr(1)  # elder siblings
PARENT = tl.constexpr(2)  # 0 for the root and padding
FIRST = tl.constexpr(3)  # where a node's siblings begin in LISTED, itself among them
OWN = tl.constexpr(4)  # where its children do
COUNT = tl.constexpr(5)  # children
ROW = tl.constexpr(6)  # of the distribution that it was drawn from
TOKEN = tl.constexpr(7)
LISTED = tl.constexpr(8)  # drafted nodes by parent, then by rank
PLAN_ROWS = tl.constexpr(9)

# Rows of float32, likewise.
INVERSE = tl.constexpr(0)  # 1 / q at the node's token
FACTOR = tl.constexpr(1)  # makes the stored distribution q; 0 for a DELTA node
BESIDES = tl.constexpr(2)  # what q has besides at the token; 1 for a DELTA node
SCALE = tl.constexpr(3)  # of what is left at the parent, before q is taken away
AT = tl.constexpr(4)  # what is left at the parent, at the node's token
HELD = tl.constexpr(5)  # probability with which the parent is held, before the test
MASS = tl.constexpr(6)  # sum of what is left at the parent, before the test
BELOW = tl.constexpr(7)  # probability with which the node is held, before its children's tests; 1 for the root
RATIO = tl.constexpr(8)  # p / q at the token
AFTER = tl.constexpr(9)  # sum of what is left at the node, after its children's tests
STATE_ROWS = tl.constexpr(10)

NOTHING = tl.constexpr(1e-20)  # of a distribution: taken for rounding, as in `operands`
TINY = tl.constexpr(1.2e-38)  # a divisor that keeps 0 / 0 at 0; the smallest normal float32


@triton.jit
def pass_prob(total, held):
    """Weigh anew with what probability a node is held, of whose distribution a rejection left this much."""
    # In this order: total + 1 would round total away.
    return tl.div_rn(total, tl.maximum(total + (1.0 - held), TINY))


@triton.jit
def _take(left, scale, factor, probs, besides, is_token):
    """Take a rejected child's distribution away from what is left."""
    return tl.maximum(left * scale - probs * factor - tl.where(is_token, besides, 0.0), 0.0)


@triton.jit
def sum_parts(parts_ptr, row, wanted, blocks, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Add up the parts of some rows, in float64 and in one order."""
    part = tl.arange(0, PARTS)
    total = tl.zeros(row.shape, tl.float64)
    for start in range(0, blocks, PARTS):
        place = row.to(tl.int64)[:, None] * blocks + start + part[None, :]
        found = tl.load(parts_ptr + place, wanted[:, None] & (start + part < blocks)[None, :], 0.0)
        total += tl.sum(found.to(tl.float64), 1)
    return total.to(dtype)


@triton.jit
def _settle(
    probs_ptr, plan_ptr, state_ptr, parts_ptr, blocks, wave, rounds, stride_r, NODES: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Settle the tests of the wave before, and weigh those of this one; the pointers are those of one sequence."""
    node = tl.arange(0, NODES)
    when, rank = tl.load(plan_ptr + WHEN * NODES + node), tl.load(plan_ptr + RANK * NODES + node)
    token = tl.load(plan_ptr + TOKEN * NODES + node)
    scale, factor = tl.load(state_ptr + SCALE * NODES + node), tl.load(state_ptr + FACTOR * NODES + node)
    besides = tl.load(state_ptr + BESIDES * NODES + node)
    held, mass = tl.load(state_ptr + HELD * NODES + node), tl.load(state_ptr + MASS * NODES + node)
    was = when == wave - 1
    total = sum_parts(parts_ptr, node, was, blocks, PARTS, tl.float32)
    is_left = total > NOTHING
    # So little is left only where p is q but for rounding: the distribution stays as it was.
    stays = was & (total <= NOTHING)
    scale, factor = tl.where(stays, 1.0, scale), tl.where(stays, 0.0, factor)
    besides = tl.where(stays, 0.0, besides)
    # The elder sibling that was tested in the wave before, of those nodes that have one.
    place = wave - 1 - (when - rank)
    follows = (place >= 0) & (place < rank)
    elder = tl.load(plan_ptr + LISTED * NODES + tl.load(plan_ptr + FIRST * NODES + node) + place, follows, 0)
    left = tl.load(state_ptr + AT * NODES + node)
    inverse, below = tl.load(state_ptr + INVERSE * NODES + node), tl.load(state_ptr + BELOW * NODES + node)
    takes = tl.gather(factor, elder, 0)
    probs = left * 0.0
    if probs_ptr is not None:
        row = tl.load(plan_ptr + ROW * NODES + elder)
        probs = tl.load(probs_ptr + row.to(tl.int64) * stride_r + token, follows & (takes != 0), 0.0).to(tl.float32)
    is_token = tl.gather(token, elder, 0) == token
    taken = _take(left, tl.gather(scale, elder, 0), takes, probs, tl.gather(besides, elder, 0), is_token)
    left = tl.where(follows, taken, left)
    tl.debug_barrier()  # every thread has read what is written from here on
    tl.store(state_ptr + SCALE * NODES + node, scale, stays)
    tl.store(state_ptr + FACTOR * NODES + node, factor, stays)
    tl.store(state_ptr + BESIDES * NODES + node, besides, stays)
    tl.store(state_ptr + AT * NODES + node, left, follows)
    # The tests of this wave.
    now = when == wave
    younger, eldest = now & (rank > 0), now & (rank == 0)
    sum_elder, held_elder = tl.gather(total, elder, 0), tl.gather(held, elder, 0)
    mass_elder = tl.where(tl.gather(is_left.to(tl.int32), elder, 0) != 0, sum_elder, tl.gather(mass, elder, 0))
    held = tl.where(younger, pass_prob(sum_elder, held_elder), held)
    mass = tl.where(younger, mass_elder, mass)
    ratio = tl.div_rn(left, mass) * inverse
    below = tl.where(younger, tl.minimum(held * ratio, 1.0), below)
    parent = tl.load(plan_ptr + PARENT * NODES + node)
    for _ in range(rounds):  # down the chains of first children, whose tests need no sum
        held = tl.where(eldest, tl.gather(below, parent, 0), held)
        below = tl.where(eldest, tl.minimum(held * ratio, 1.0), below)
    tl.store(state_ptr + HELD * NODES + node, held, now)
    tl.store(state_ptr + MASS * NODES + node, mass, now)
    tl.store(state_ptr + BELOW * NODES + node, below, now)
    tl.store(state_ptr + RATIO * NODES + node, ratio, now)
    tl.store(state_ptr + SCALE * NODES + node, tl.div_rn(held, mass), now)


@jit(
    fuses=False,
    do_not_specialize=["blocks", "wave", "rounds", "stride_b", "stride_r"],
    do_not_specialize_on_alignment=["probs_ptr"],
)
def settle_kernel(
    probs_ptr, plan_ptr, state_ptr, parts_ptr, blocks, wave, rounds, stride_b, stride_r,
    NODES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Settle one wave and weigh the next; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    own_ptr = probs_ptr
    if probs_ptr is not None:
        own_ptr = probs_ptr + batch * stride_b
    _settle(
        own_ptr, plan_ptr + batch * PLAN_ROWS * NODES, state_ptr + batch * STATE_ROWS * NODES,
        parts_ptr + batch * NODES * blocks, blocks, wave, rounds, stride_r, NODES, PARTS,
    )  # fmt: skip


@triton.jit
def left_of(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, node, first, count, index, vocab, stride_dist_n, stride_r,
    NODES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute what the first children of a node leave of its distribution, at some tokens."""
    vocab = end_of(vocab, ALIGNED)
    left = tl.load(row_of(dist_ptr, node, stride_dist_n, ALIGNED) + index, index < vocab, 0.0).to(tl.float32)
    for place in range(count):
        child = tl.load(plan_ptr + LISTED * NODES + first + place)
        factor = tl.load(state_ptr + FACTOR * NODES + child)
        probs = left * 0.0
        if probs_ptr is not None:
            row = tl.load(plan_ptr + ROW * NODES + child)
            wanted = index < tl.where(factor != 0, vocab, 0)
            probs = tl.load(row_of(probs_ptr, row, stride_r, ALIGNED) + index, wanted, 0.0).to(tl.float32)
        is_token = index == tl.load(plan_ptr + TOKEN * NODES + child)
        scale, besides = tl.load(state_ptr + SCALE * NODES + child), tl.load(state_ptr + BESIDES * NODES + child)
        left = _take(left, scale, factor, probs, besides, is_token)
    return left


@triton.jit
def _reject(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, child, index, vocab, stride_dist_n, stride_r,
    NODES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum at some tokens what the rejection of a child leaves at its parent."""
    left = left_of(
        dist_ptr, probs_ptr, plan_ptr, state_ptr, tl.load(plan_ptr + PARENT * NODES + child),
        tl.load(plan_ptr + FIRST * NODES + child), tl.load(plan_ptr + RANK * NODES + child) + 1,
        index, vocab, stride_dist_n, stride_r, NODES, ALIGNED,
    )  # fmt: skip
    return tl.sum(left, 0)


@jit(
    fuses=False,
    do_not_specialize=["vocab", "wave", "stride_dist_b", "stride_dist_n", "stride_b", "stride_r"],
    do_not_specialize_on_alignment=["dist_ptr", "probs_ptr"],
)
def reject_kernel(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, parts_ptr, vocab, wave, stride_dist_b, stride_dist_n, stride_b,
    stride_r,
    NODES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum over a block what the rejections of one wave leave; grid (blocks, nodes, batch)."""
    block, child, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    plan_ptr += batch * PLAN_ROWS * NODES
    if tl.load(plan_ptr + WHEN * NODES + child) == wave:
        own_ptr = probs_ptr
        if probs_ptr is not None:
            own_ptr = probs_ptr + batch * stride_b
        total = _reject(
            dist_ptr + batch * stride_dist_b, own_ptr, plan_ptr, state_ptr + batch * STATE_ROWS * NODES, child,
            block * BLOCK + tl.arange(0, BLOCK), vocab, stride_dist_n, stride_r, NODES, ALIGNED,
        )  # fmt: skip
        tl.store(parts_ptr + (batch * NODES + child) * tl.num_programs(0) + block, total)


@jit(
    fuses=False,
    do_not_specialize=[
        "n", "vocab", "blocks", "wave", "rounds", "stride_dist_b", "stride_dist_n", "stride_b", "stride_r"
    ],
    do_not_specialize_on_alignment=["dist_ptr", "probs_ptr"],
)  # fmt: skip
def rest_kernel(
    dist_ptr, probs_ptr, plan_ptr, state_ptr, parts_ptr, n, vocab, blocks, wave, rounds,
    stride_dist_b, stride_dist_n, stride_b, stride_r,
    NODES: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Go through the waves from this one on, if there are any, one after the other; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    plan_ptr += batch * PLAN_ROWS * NODES
    state_ptr += batch * STATE_ROWS * NODES
    parts_ptr += batch * NODES * blocks
    dist_ptr += batch * stride_dist_b
    own_ptr = probs_ptr
    if probs_ptr is not None:
        own_ptr = probs_ptr + batch * stride_b
    last = tl.max(tl.load(plan_ptr + WHEN * NODES + tl.arange(0, NODES)), 0)
    for number in range(wave, last + 1):
        _settle(own_ptr, plan_ptr, state_ptr, parts_ptr, blocks, number, rounds, stride_r, NODES, PARTS)
        tl.debug_barrier()  # what it stored is read by other threads
        for child in range(1, n):
            if tl.load(plan_ptr + WHEN * NODES + child) == number:
                for block in range(blocks):
                    total = _reject(
                        dist_ptr, own_ptr, plan_ptr, state_ptr, child, block * BLOCK + tl.arange(0, BLOCK), vocab,
                        stride_dist_n, stride_r, NODES, ALIGNED,
                    )  # fmt: skip
                    tl.store(parts_ptr + child * blocks + block, total)
        tl.debug_barrier()
