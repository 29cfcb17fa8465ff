"""The gated delta operations in Triton (gated DeltaNet, KDA): scan of a tree, commit of a path, and both in one pass.

One program owns some columns (dv) of one head of one sequence: it reads that part of the state once, commits the path,
stores it where there was something to commit, solves for u and scores the tree.  k and g are shared by programs, so
when new rows replace the rows of the path that is being committed, a second, small launch stashes them; a caller who
alternates between two stashes (`previous`) saves it.  `docs/maths.md` has the maths, `docs/gpu.md` the counted costs.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.device_functions import STEP_INTEGERS, is_ancestor, split_decay
from stree.kernels.tiles import (
    MAX_DELTA_DIM,
    MAX_NODES,
    GatedDeltaTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["gated_delta_commit", "gated_delta_step", "gated_delta_tree_scan"]

Rows = tuple[Tensor, Tensor, Tensor]  # k, u and g


@triton.jit
def _path_sums(bits_ptr, log_decay, n, NODES: tl.constexpr, WORDS: tl.constexpr):
    """Sum log decays [NODES, BLOCK_K] up root paths: a multiple of 1/8 without any error, and a small rest.

    e^-105 is 0 in float32, so clamping there loses nothing.  The parts have at most 11 bits, which float16 holds.
    """
    node = tl.arange(0, NODES)
    # The word of each pair, not all words of each row as in `is_ancestor`: those would not fit in registers.
    word_ptr = bits_ptr + node[:, None] * WORDS + (node // 32)[None, :]
    word = tl.load(word_ptr, (node < n)[:, None] & (node < n)[None, :], 0)
    below = ((word >> (node % 32)[None, :]) & 1).to(tl.float16)
    bounded = tl.maximum(log_decay, -105.0)
    high = tl.floor(bounded * 8.0 + 0.5) * 0.125
    middle = tl.floor((bounded - high) * 8192.0 + 0.5) * 0.0001220703125
    low = (bounded - high) - middle
    fine = tl.dot(below, middle.to(tl.float16)) + tl.dot(below, low.to(tl.float16))
    return tl.dot(below, high.to(tl.float16)), fine


@triton.jit
def _exp_of_sum(coarse, fine):
    """Compute e^(coarse + fine) for multiples of 1/8 and small numbers: ln 2 is taken out in a part of 9 bits first."""
    power = tl.floor(coarse * 1.4426950408889634 + 0.5)
    return tl.exp2(power) * tl.exp((coarse - power * 0.693359375) + (power * 2.1219444005469058e-4 + fine))


@triton.jit
def _add_channel_scores(coupling, weight, query, key, coarse, fine, WINDOW: tl.constexpr, EXACT: tl.constexpr):
    """Add sum_c key_jc e^(G_ic - G_jc) probe_ic at [j, i] over a block of channels, for the probes key and query.

    A pass serves the keys whose G lies in one window of that width, and measures both exponents from its upper end:
    neither factor overflows, and one underflows only where the decay is nothing.  Pairs off the path are finite.
    """
    query, key = query.to(tl.float32), key.to(tl.float32)
    for window in range(0, (tl.max(-coarse) * (1.0 / WINDOW)).to(tl.int32) + 1):
        below_end = coarse + window * WINDOW
        inside = (below_end <= 0.0) & (below_end > -WINDOW)
        source = tl.where(inside, key * _exp_of_sum(tl.where(inside, -below_end, 0.0), -fine), 0.0)
        decay = _exp_of_sum(tl.minimum(below_end, 0.0), fine)
        coupling += tl.dot(source, tl.trans(key * decay), input_precision=EXACT)
        weight += tl.dot(source, tl.trans(query * decay), input_precision=EXACT)
    return coupling, weight


@triton.jit
def _take_rows(tensor, block, NODES: tl.constexpr, WIDTH: tl.constexpr):
    """Take rows 16 block .. 16 block + 15 of [NODES, WIDTH]."""
    index = tl.arange(0, NODES // 16)[:, None, None]
    return tl.sum(tl.where(index == block, tl.reshape(tensor, (NODES // 16, 16, WIDTH)), 0.0), 0)


@triton.jit
def _take_columns(tensor, block, ROWS: tl.constexpr, NODES: tl.constexpr):
    """Take columns 16 block .. 16 block + 15 of [ROWS, NODES]."""
    index = tl.arange(0, NODES // 16)[None, :, None]
    return tl.sum(tl.where(index == block, tl.reshape(tensor, (ROWS, NODES // 16, 16)), 0.0), 1)


@triton.jit
def _load_rows(rows_ptr, stash_ptr, is_new, is_old, is_keeper, KEEP: tl.constexpr, STASHED: tl.constexpr):
    """Load new rows as the stash holds them, and stash them if asked; load older rows from the stash."""
    rows = tl.load(rows_ptr, is_new, 0.0).to(stash_ptr.dtype.element_ty)
    if KEEP and is_keeper:
        tl.store(stash_ptr, rows, is_new)
    if STASHED:
        rows = tl.where(is_old, tl.load(stash_ptr, is_old, 0.0), rows)
    return rows


@triton.jit
def _head_decays(log_decay, below):
    """Compute e^G_i, and e^(G_i - G_j) at [j, i] on the path, of one log decay a node."""
    coarse, fine = split_decay(log_decay)
    coarse = tl.sum(tl.where(below, coarse[:, None], 0.0), 0)
    fine = tl.sum(tl.where(below, fine[:, None], 0.0), 0)
    between = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
    return tl.exp(coarse + fine), tl.where(below, tl.exp(tl.where(below, between, 0.0)), 0.0)


@triton.jit
def _solve(
    u_ptr, stride_u_n, n, wanted, coupling, weight, target, out, below,
    NODES: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Solve u + u coupling = target by substitution, store u and return out + u weight.

    It goes 16 nodes (columns) after 16 nodes.  A round makes one more level among them exact; what deeper levels hold
    until then is read by no finished one.
    """
    node = tl.arange(0, NODES)
    near = below & ((node // 16)[:, None] == (node // 16)[None, :])
    levels = tl.sum(near.to(tl.int32), 0)
    for block in range(0, NODES // 16):
        start = _take_columns(target, block, BLOCK_V, NODES)
        rows = _take_rows(coupling, block, NODES, NODES)
        inner = _take_columns(rows, block, 16, NODES)
        u = start
        for _ in range(1, tl.max(tl.where(node // 16 == block, levels, 0))):
            u = start - tl.dot(u, inner, input_precision=EXACT)
        target -= tl.dot(u, rows, input_precision=EXACT)
        out += tl.dot(u, _take_rows(weight, block, NODES, NODES), input_precision=EXACT)
        solved = block * 16 + tl.arange(0, 16)[None, :]
        tl.store(u_ptr + solved * stride_u_n, u, (solved < n) & wanted)
    return out


@triton.jit(do_not_specialize=(*STEP_INTEGERS, "stride_g_b", "stride_beta_b"))
def gated_delta_kernel(
    state_ptr, bits_ptr, o_ptr, u_ptr, known_ptr, path_ptr, lengths_ptr, old_k_ptr, old_u_ptr, old_g_ptr,
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, stash_k_ptr, stash_g_ptr,
    n, first, new_from, known, path_size, nheads, scale,
    stride_state_b, stride_old_k_b, stride_old_k_n, stride_old_u_b, stride_old_u_n, stride_old_g_b, stride_old_g_n,
    stride_q_b, stride_q_n, stride_k_b, stride_k_n, stride_v_b, stride_v_n, stride_g_b, stride_g_n,
    stride_beta_b, stride_beta_n, stride_stash_k_b, stride_stash_k_n, stride_stash_g_b, stride_stash_g_n,
    stride_u_b, stride_u_n, stride_known_b, stride_known_n,
    DK: tl.constexpr, DV: tl.constexpr, SHARED: tl.constexpr, NODES: tl.constexpr, PATH: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr, COMMIT: tl.constexpr,
    SCAN: tl.constexpr, KEEP: tl.constexpr, STASHED: tl.constexpr, KNOWN: tl.constexpr, WIDE: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Commit a path to some columns of a state and score a tree with them; grid (blocks of dv, heads, batch)."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    node = tl.arange(0, NODES)
    k_inner, g_inner = (head // SHARED) * DK, head * (DK if CHANNELS else 1)
    state_ptr += batch * stride_state_b + head * DK * DV
    if COMMIT:
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        entry = tl.arange(0, PATH)
        row = tl.load(path_ptr + batch * path_size + entry, mask=entry < length, other=0)
        old_k_ptr += batch * stride_old_k_b + row * stride_old_k_n + k_inner
        old_u_ptr += batch * stride_old_u_b + row * stride_old_u_n + head * DV
        old_g_ptr += batch * stride_old_g_b + row * stride_old_g_n + g_inner
        written_mask = (entry < length)[None, :] & (column < DV)[:, None]
        written = tl.load(old_u_ptr[None, :] + column[:, None], written_mask, 0.0).to(tl.float32)
        # Sums of what follows an entry need no care: a sum whose rounding is seen belongs to a decay of nothing.
        follows = entry[None, :] > entry[:, None]
        if not CHANNELS:
            old_g = tl.load(old_g_ptr, entry < length, 0.0).to(tl.float32)
            total = tl.exp(tl.sum(old_g, 0))
            written *= tl.exp(tl.sum(tl.where(follows, old_g[None, :], 0.0), 1))[None, :]
    if SCAN:
        bits_ptr += batch * n * WORDS
        is_new, is_old = (node >= new_from) & (node < n), node < new_from
        q_ptr += batch * stride_q_b + (node - new_from) * stride_q_n + k_inner
        k_ptr += batch * stride_k_b + (node - new_from) * stride_k_n + k_inner
        if ALIGNED:  # rows of g of all key channels, whatever their number
            stride_g_b = tl.multiple_of(stride_g_b, 16)
        g_ptr += batch * stride_g_b + (node - new_from) * stride_g_n + g_inner
        stash_k_ptr += batch * stride_stash_k_b + node * stride_stash_k_n + k_inner
        stash_g_ptr += batch * stride_stash_g_b + node * stride_stash_g_n + g_inner
        keeps_g = tl.program_id(0) == 0
        keeps_k = keeps_g & (head % SHARED == 0)
        coupling = tl.zeros((NODES, NODES), tl.float32)
        weight = tl.zeros((NODES, NODES), tl.float32)
        # Scores first, in a loop of their own: with the state beside them they would not fit in registers.
        for start in tl.range(0, DK, BLOCK_K, disable_licm=True):
            c = start + tl.arange(0, BLOCK_K)[None, :]
            new, old = is_new[:, None] & (c < DK), is_old[:, None] & (c < DK)
            key = _load_rows(k_ptr[:, None] + c, stash_k_ptr[:, None] + c, new, old, keeps_k, KEEP, STASHED)
            query = tl.load(q_ptr[:, None] + c, new, 0.0)
            if CHANNELS:
                logs = _load_rows(g_ptr[:, None] + c, stash_g_ptr[:, None] + c, new, old, keeps_g, KEEP, STASHED)
                coarse, fine = _path_sums(bits_ptr, logs.to(tl.float32), n, NODES, WORDS)
                coupling, weight = _add_channel_scores(coupling, weight, query, key, coarse, fine, WINDOW, EXACT)
            else:
                if WIDE or query.dtype != key.dtype:
                    query = query.to(tl.float32)
                narrow = key.to(tl.float32) if WIDE else key
                coupling += tl.dot(narrow, tl.trans(narrow), input_precision=EXACT)
                weight += tl.dot(key.to(query.dtype), tl.trans(query), input_precision=EXACT)
        below = is_ancestor(bits_ptr, node[None, :], node[:, None], n, WORDS)
        if not CHANNELS:
            logs = _load_rows(g_ptr, stash_g_ptr, is_new, is_old, keeps_g, KEEP, STASHED)
            from_root, between = _head_decays(logs.to(tl.float32), below)
            coupling, weight = coupling * between, weight * between
        beta_ptr += batch * stride_beta_b + (node - new_from) * stride_beta_n + head
        beta = tl.load(beta_ptr, is_new, 0.0).to(tl.float32)[None, :]
        above = below & (node[:, None] < node[None, :]) & (node >= known)[None, :]
        coupling, weight = tl.where(above, coupling * beta, 0.0), tl.where(below, weight, 0.0)
        # Transposed products: the warps share the columns of the state, so none of them depends on another's u.
        seen_k = tl.zeros((BLOCK_V, NODES), tl.float32)
        seen_q = tl.zeros((BLOCK_V, NODES), tl.float32)
    for start in tl.range(0, DK, BLOCK_K, disable_licm=True):
        c = start + tl.arange(0, BLOCK_K)[None, :]
        tile_mask = (column < DV)[:, None] & (c < DK)
        tile_ptr = state_ptr + c * DV + column[:, None]
        state = tl.load(tile_ptr, tile_mask, 0.0)
        if COMMIT:  # noqa: SIM102 - COMMIT is known to the compiler, length is not
            if length > 0:
                old_mask = (entry < length)[:, None] & (c < DK)
                old_k = tl.load(old_k_ptr[:, None] + c, old_mask, 0.0).to(tl.float32)
                if CHANNELS:
                    old_g = tl.load(old_g_ptr[:, None] + c, old_mask, 0.0).to(tl.float32)
                    total = tl.exp(tl.sum(old_g, 0))[None, :]
                    old_k *= tl.exp(tl.dot(follows.to(tl.float32), old_g, input_precision=EXACT))
                state = state * total + tl.dot(written, old_k, input_precision=EXACT)
                tl.store(tile_ptr, state, tile_mask)
        if SCAN:
            new, old = is_new[:, None] & (c < DK), is_old[:, None] & (c < DK)
            key = _load_rows(k_ptr[:, None] + c, stash_k_ptr[:, None] + c, new, old, keeps_k, False, STASHED)
            key, query = key.to(tl.float32), tl.load(q_ptr[:, None] + c, new, 0.0).to(tl.float32)
            if CHANNELS:
                logs = _load_rows(g_ptr[:, None] + c, stash_g_ptr[:, None] + c, new, old, keeps_g, False, STASHED)
                coarse, fine = _path_sums(bits_ptr, logs.to(tl.float32), n, NODES, WORDS)
                key, query = key * tl.exp(coarse + fine), query * tl.exp(coarse + fine)
            seen_k += tl.dot(state, tl.trans(key), input_precision=EXACT)
            seen_q += tl.dot(state, tl.trans(query), input_precision=EXACT)
    if SCAN:
        if not CHANNELS:
            seen_k, seen_q = seen_k * from_root[None, :], seen_q * from_root[None, :]
        wanted = (column < DV)[:, None]
        # Read again, not held through the loop, where they would not fit in registers beside the scores.
        below = is_ancestor(bits_ptr, node[None, :], node[:, None], n, WORDS)
        beta = tl.load(beta_ptr, is_new, 0.0).to(tl.float32)[None, :]
        value_ptr = v_ptr + batch * stride_v_b + ((node - new_from) * stride_v_n + head * DV)[None, :] + column[:, None]
        value = tl.load(value_ptr, is_new[None, :] & wanted, 0.0).to(tl.float32)
        target = beta * (value - seen_k)
        # A padding node's may be infinite, and 0 times that would reach the other nodes.
        is_node = (node == 0) | (tl.sum(below.to(tl.int32), 0) > 1)
        target = tl.where(is_node[None, :], target, tl.minimum(tl.maximum(target, -1e30), 1e30))
        if KNOWN:
            is_known = (node < known)[None, :]
            given_ptr = known_ptr + batch * stride_known_b + (node * stride_known_n + head * DV)[None, :]
            target = tl.where(is_known, tl.load(given_ptr + column[:, None], is_known & wanted, 0.0), target)
        u_ptr += batch * stride_u_b + head * DV + column[:, None]
        tl.debug_barrier()  # other warps may still read, from the same stash, the path that they commit
        out = _solve(u_ptr, stride_u_n, n, wanted, coupling, weight, target, seen_q, below, NODES, BLOCK_V, EXACT)
        o_ptr += ((batch * (n - first) + node - first) * nheads + head)[None, :] * DV + column[:, None]
        tl.store(o_ptr, out * scale, ((node >= first) & (node < n))[None, :] & wanted)


@triton.jit(do_not_specialize=(*STEP_INTEGERS, "stride_g_b"))
def gated_delta_keep_kernel(
    k_ptr, g_ptr, stash_k_ptr, stash_g_ptr, first, key_width, g_width,
    stride_k_b, stride_k_n, stride_g_b, stride_g_n,
    stride_stash_k_b, stride_stash_k_n, stride_stash_g_b, stride_stash_g_n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stash one row of k and g, which the programs of `gated_delta_kernel` share; grid (rows, batch)."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    stash_k_ptr += batch * stride_stash_k_b + (first + row) * stride_stash_k_n
    for start in range(0, key_width, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        key = tl.load(k_ptr + batch * stride_k_b + row * stride_k_n + inner, inner < key_width, 0.0)
        tl.store(stash_k_ptr + inner, key, inner < key_width)
    stash_g_ptr += batch * stride_stash_g_b + (first + row) * stride_stash_g_n
    for start in range(0, g_width, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        log_decay = tl.load(g_ptr + batch * stride_g_b + row * stride_g_n + inner, inner < g_width, 0.0)
        tl.store(stash_g_ptr + inner, log_decay, inner < g_width)


def gated_delta_tree_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    topology: Topology,
    state: Tensor,
    *,
    scale: float | None = None,
    first: int = 0,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score a tree; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_tree_scan", q=q, k=k, v=v, g=g, beta=beta, u=u)
    batch, n, heads, dv = v.shape
    o = torch.empty(batch, n - first, heads, dv, dtype=v.dtype, device=v.device)
    solved = torch.empty(batch, n, heads, dv, dtype=torch.float32, device=v.device)
    _launch(
        "gated_delta_tree_scan", state, new=(q, k, v, g, beta), topology=topology, o=o, u=solved,
        given=u, known=0 if u is None else first, scale=scale, first=first,
    )  # fmt: skip
    return o, solved


def gated_delta_commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_commit", k=k, u=u, g=g)
    _launch("gated_delta_commit", state, old=(k, u, g), accepted=accepted)


def gated_delta_step(
    state: Tensor,
    stash_k: Tensor,
    stash_u: Tensor,
    stash_g: Tensor,
    accepted: AcceptedPath | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    topology: Topology,
    *,
    scale: float | None = None,
    first: int = 0,
    previous: Rows | None = None,
) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_step", q=q, k=k, v=v, g=g, beta=beta, stash_k=stash_k, stash_u=stash_u, stash_g=stash_g)
    batch, rows, heads, dv = v.shape
    o = torch.empty(batch, rows, heads, dv, dtype=v.dtype, device=v.device)
    old = None
    if accepted is not None:
        old = (stash_k, stash_u, stash_g) if previous is None else previous
        _check_dtypes("gated_delta_step", **{f"previous[{i}]": rows for i, rows in enumerate(old)})
    in_place = accepted is not None and previous is None
    _launch(
        "gated_delta_step", state, old=old, accepted=accepted, new=(q, k, v, g, beta), topology=topology,
        o=o, u=stash_u, given=stash_u, known=first, stash=(stash_k, stash_g), keep=not in_place, scale=scale,
        first=first,
    )  # fmt: skip
    if in_place:
        gated_delta_keep_kernel[(rows, batch)](
            k, g, stash_k, stash_g, first, k[0, 0].numel(), g[0, 0].numel(),
            *k.stride()[:2], *g.stride()[:2], *stash_k.stride()[:2], *stash_g.stride()[:2], BLOCK=512,
        )  # fmt: skip
    return o


def _check_dtypes(op: str, **tensors: Tensor | None) -> None:
    """Require dtypes that the kernels take; every tensor may have its own."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_kernel_dtypes(op, **{name: tensor})


def _launch(
    op: str,
    state: Tensor,
    *,
    old: Rows | None = None,
    accepted: AcceptedPath | None = None,
    new: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
    topology: Topology | None = None,
    o: Tensor | None = None,
    u: Tensor | None = None,
    given: Tensor | None = None,
    known: int = 0,
    stash: tuple[Tensor, Tensor] | None = None,
    keep: bool = False,
    scale: float | None = None,
    first: int = 0,
) -> None:
    """Launch the kernel for a commit (old and accepted), a scan (new, topology, o and u), or both."""
    batch, heads, dk, dv = state.shape
    check_limit(op, "a dk", dk, MAX_DELTA_DIM)
    check_limit(op, "a dv", dv, MAX_DELTA_DIM)
    check_inner("state", state, 3)
    n, path_size, bits, new_from = 1, 1, None, 0
    old_k = old_u = old_g = q = k = v = g = beta = stash_k = stash_g = None
    if old is not None:
        assert accepted is not None, "a commit needs the accepted path"
        old_k, old_u, old_g = old
        path_size = accepted.rows.shape[1]
        _check_rows({"k": old_k, "u": old_u, "g": old_g})
    if new is not None:
        assert topology is not None and u is not None, "a scan needs a topology and a place for u"
        q, k, v, g, beta = new
        n, bits = topology.num_nodes, topology.ancestor_bits()
        stash_k, stash_g = (k, g) if stash is None else stash
        new_from = 0 if stash is None else first
        _check_rows({"q": q, "k": k, "v": v, "g": g, "beta": beta})
        _check_rows({"stash_k": stash_k, "stash_g": stash_g, "u": u} | ({} if given is None else {"u": given}))
    check_limit(op, "trees of nodes", n, MAX_NODES)
    check_limit(op, "a path of nodes", path_size, MAX_NODES)
    keys, decays = (old_k, old_g) if k is None else (k, g)
    assert keys is not None and decays is not None, "a launch commits or scans"
    channels = decays.ndim == 4
    tile = GatedDeltaTile.of(n, path_size, dk, dv, channels)
    gated_delta_kernel[(-(-dv // tile.value), heads, batch)](
        state, bits, o, u, given, None if accepted is None else accepted.rows,
        None if accepted is None else accepted.lengths, old_k, old_u, old_g, q, k, v, g, beta, stash_k, stash_g,
        n, first, new_from, known, path_size, heads, dk**-0.5 if scale is None else float(scale),
        state.stride(0), *_strides(old_k), *_strides(old_u), *_strides(old_g), *_strides(q), *_strides(k),
        *_strides(v), *_strides(g), *_strides(beta), *_strides(stash_k), *_strides(stash_g), *_strides(u),
        *_strides(given),
        **gated_delta_constants(
            tile, dk, dv, heads // keys.shape[2], n, channels=channels, commit=old is not None, scan=new is not None,
            keep=keep, stashed=new_from > 0, known=known > 0,
            aligned=channels and g is not None and g.stride(0) % 16 == 0 == g.stride(1) % 16,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def gated_delta_constants(
    tile: GatedDeltaTile,
    dk: int,
    dv: int,
    shared: int,
    n: int,
    *,
    channels: bool,
    commit: bool,
    scan: bool,
    keep: bool,
    stashed: bool,
    known: bool,
    aligned: bool,
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "DK": dk, "DV": dv, "SHARED": shared, "NODES": tile.nodes, "PATH": tile.path, "BLOCK_K": tile.key,
        "BLOCK_V": tile.value, "WORDS": -(-n // 32), "CHANNELS": channels, "COMMIT": commit, "SCAN": scan, "KEEP": keep,
        "STASHED": stashed, "KNOWN": known, "ALIGNED": aligned,
        "WIDE": interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        "EXACT": "tf32x3",
        "WINDOW": 64,  # e^64 and e^-64 leave float32 room for the factors and for the low parts of tf32x3
    }  # fmt: skip


def _check_rows(rows: dict[str, Tensor]) -> None:
    """Require that a node's row of every tensor is contiguous."""
    for name, tensor in rows.items():
        check_inner(name, tensor, tensor.ndim - 2)


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Take the strides over sequences and nodes; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
