"""The gated delta operations in Triton (gated DeltaNet, KDA): scan of a tree, commit of a path, and both in one pass.

One program owns some columns (dv) of one head of one sequence: it reads that part of the state once, commits the path,
stores it where there was something to commit, solves for u and scores the tree.  k and g are shared by programs, so a
path can be committed in the launch that stashes new rows only from another stash (`previous`); without one the commit
is a launch of its own.  `docs/maths.md` has the maths, `docs/gpu.md` the counted costs.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from stree.kernels.delta_rule.device_functions import (
    add_channel_scores,
    head_decays,
    load_rows,
    path_sums,
    solve,
)
from stree.kernels.device_functions import STEP_INTEGERS, is_ancestor
from stree.kernels.dispatch import Operands
from stree.kernels.jit import jit
from stree.kernels.launch import path_operands, strides
from stree.kernels.tiles import (
    MAX_DELTA_DIM,
    MAX_NODES,
    GatedDeltaTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
)
from stree.kernels.topology import AcceptedPath

__all__ = ["gated_delta_commit", "gated_delta_step", "gated_delta_tree_scan"]


@jit(fuses=True, do_not_specialize=(*STEP_INTEGERS, "stride_g_b", "stride_beta_b"))
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
        first_g = batch * stride_g_b
        if ALIGNED:  # rows of g of all key channels, whatever their number
            first_g = tl.multiple_of(first_g, 16)
        g_ptr += first_g + (node - new_from) * stride_g_n + g_inner
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
            key = load_rows(k_ptr[:, None] + c, stash_k_ptr[:, None] + c, new, old, keeps_k, KEEP, STASHED)
            query = tl.load(q_ptr[:, None] + c, new, 0.0)
            if CHANNELS:
                logs = load_rows(g_ptr[:, None] + c, stash_g_ptr[:, None] + c, new, old, keeps_g, KEEP, STASHED)
                coarse, fine = path_sums(bits_ptr, logs.to(tl.float32), n, NODES, WORDS)
                coupling, weight = add_channel_scores(coupling, weight, query, key, coarse, fine, WINDOW, EXACT)
            else:
                if WIDE or query.dtype != key.dtype:
                    query = query.to(tl.float32)
                narrow = key.to(tl.float32) if WIDE else key
                coupling += tl.dot(narrow, tl.trans(narrow), input_precision=EXACT)
                weight += tl.dot(key.to(query.dtype), tl.trans(query), input_precision=EXACT)
        below = is_ancestor(bits_ptr, node[None, :], node[:, None], n, WORDS)
        if not CHANNELS:
            logs = load_rows(g_ptr, stash_g_ptr, is_new, is_old, keeps_g, KEEP, STASHED)
            from_root, between = head_decays(logs.to(tl.float32), below)
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
            key = load_rows(k_ptr[:, None] + c, stash_k_ptr[:, None] + c, new, old, keeps_k, False, STASHED)
            key, query = key.to(tl.float32), tl.load(q_ptr[:, None] + c, new, 0.0).to(tl.float32)
            if CHANNELS:
                logs = load_rows(g_ptr[:, None] + c, stash_g_ptr[:, None] + c, new, old, keeps_g, False, STASHED)
                coarse, fine = path_sums(bits_ptr, logs.to(tl.float32), n, NODES, WORDS)
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
        out = solve(u_ptr, stride_u_n, n, wanted, coupling, weight, target, seen_q, below, NODES, BLOCK_V, EXACT)
        o_ptr += ((batch * (n - first) + node - first) * nheads + head)[None, :] * DV + column[:, None]
        tl.store(o_ptr, out * scale, ((node >= first) & (node < n))[None, :] & wanted)


def gated_delta_tree_scan(a: Operands) -> tuple[Tensor, Tensor]:
    """Score a tree; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_tree_scan", q=a.q, k=a.k, v=a.v, g=a.g, beta=a.beta, u=a.u)
    batch, n, heads, dv = a.v.shape
    o = torch.empty(batch, n - a.first, heads, dv, dtype=a.v.dtype, device=a.v.device)
    solved = torch.empty(batch, n, heads, dv, dtype=torch.float32, device=a.v.device)
    known = 0 if a.u is None else a.first
    _launch("gated_delta_tree_scan", a.state, scan=a, stash=(a.k, a.g), o=o, u=solved, given=a.u, known=known)
    return o, solved


def gated_delta_commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_commit", k=k, u=u, g=g)
    _launch("gated_delta_commit", state, accepted=accepted, old=(k, u, g))


def gated_delta_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    stash, accepted, old = {"stash_k": a.stash_k, "stash_u": a.stash_u, "stash_g": a.stash_g}, a.accepted, None
    _check_dtypes("gated_delta_step", q=a.q, k=a.k, v=a.v, g=a.g, beta=a.beta, **stash)
    if accepted is not None:
        old = a.previous or tuple(stash.values())
        _check_dtypes("gated_delta_step", **{f"previous[{i}]": rows for i, rows in enumerate(old)})
        if a.previous is None:
            _launch("gated_delta_step", a.state, accepted=accepted, old=old)
            accepted = old = None
    o = torch.empty(a.v.shape, dtype=a.v.dtype, device=a.v.device)
    _launch(
        "gated_delta_step", a.state, accepted=accepted, old=old, scan=a, stash=(a.stash_k, a.stash_g), keep=True,
        o=o, u=a.stash_u, given=a.stash_u, known=a.first,
    )  # fmt: skip
    return o


def _check_dtypes(op: str, **tensors: Tensor | None) -> None:
    """Require dtypes that the kernels take; every tensor may have its own."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_kernel_dtypes(op, **{name: tensor})


def _launch(
    op: str, state: Tensor, *, accepted: AcceptedPath | None = None, old: tuple[Tensor, ...] | None = None,
    scan: Operands | None = None, stash: tuple[Tensor | None, ...] = (None, None), keep: bool = False,
    o: Tensor | None = None, u: Tensor | None = None, given: Tensor | None = None, known: int = 0,
) -> None:  # fmt: skip
    """Launch the kernel for a commit (accepted and old k, u, g), a scan (its operands, o and u), or both."""
    batch, heads, dk, dv = state.shape
    check_limit(op, "a dk", dk, MAX_DELTA_DIM)
    check_limit(op, "a dv", dv, MAX_DELTA_DIM)
    check_inner("state", state, 3)
    path, lengths, entries = path_operands(accepted)
    check_limit(op, "a path of nodes", entries, MAX_NODES)
    old_k, old_u, old_g = _checked(("k", "u", "g"), old or (None, None, None))
    q = k = v = g = beta = bits = None
    n, first, scale = 1, 0, None
    if scan is not None:
        n, first, scale, bits = scan.topology.num_nodes, scan.first, scan.scale, scan.topology.bits
        check_limit(op, "trees of nodes", n, MAX_NODES)
        q, k, v, g, beta = _checked(("q", "k", "v", "g", "beta"), (scan.q, scan.k, scan.v, scan.g, scan.beta))
    stash_k, stash_g, _ = _checked(("stash_k", "stash_g", "u"), (*stash, given))
    new_from = first if keep else 0
    keys, decays = (old_k, old_g) if scan is None else (scan.k, scan.g)
    channels = decays.ndim == 4
    tile = GatedDeltaTile.of(n, entries, dk, dv, channels)
    gated_delta_kernel[(-(-dv // tile.value), heads, batch)](
        state, bits, o, u, given, path, lengths, old_k, old_u, old_g, q, k, v, g, beta, stash_k, stash_g,
        n, first, new_from, known, entries, heads, dk**-0.5 if scale is None else float(scale),
        state.stride(0), *strides(old_k), *strides(old_u), *strides(old_g), *strides(q), *strides(k),
        *strides(v), *strides(g), *strides(beta), *strides(stash_k), *strides(stash_g), *strides(u), *strides(given),
        DK=dk, DV=dv, SHARED=heads // keys.shape[2], NODES=tile.nodes, PATH=tile.path, BLOCK_K=tile.key,
        BLOCK_V=tile.value, WORDS=-(-n // 32), CHANNELS=channels, COMMIT=old is not None, SCAN=scan is not None,
        KEEP=keep, STASHED=new_from > 0, KNOWN=known > 0,
        ALIGNED=channels and g is not None and g.stride(0) % 16 == 0 == g.stride(1) % 16,
        WIDE=interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        EXACT="tf32x3",
        WINDOW=64,  # e^64 and e^-64 leave float32 room for the factors and for the low parts of tf32x3
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _checked(names: Sequence[str], rows: Sequence[Tensor | None]) -> Sequence[Any]:
    """Require that a node's row of every tensor is contiguous."""
    for name, tensor in zip(names, rows, strict=True):
        if tensor is not None:
            check_inner(name, tensor, tensor.ndim - 2)
    return rows
