"""The diagonal recurrences in Triton (Mamba-1, RG-LRU): scan of a tree, commit of a path, and both in one pass.

One program owns a block of channels of a sequence, with all their states.  It commits the path, stores the state where
there was something to commit, and visits the nodes depth first with the few states that stay in registers
(`step/walk.py`).  Channels are independent, so a program may overwrite the rows of x and of the step sizes that it
has committed.  B is read by all programs, so a path of Mamba-1 can be committed in the launch that stashes new rows
only from another stash (`previous`); without one the commit is a launch of its own.
"""

# mypy: disable-error-code="assignment, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.device_functions import STEP_INTEGERS, softplus
from stree.kernels.dispatch import Operands
from stree.kernels.jit import jit
from stree.kernels.launch import path_operands, strides
from stree.kernels.tiles import MAX_DSTATE, MAX_NODES, DiagonalTile, check_inner, check_kernel_dtypes, check_limit
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "diagonal_commit", "diagonal_step", "diagonal_tree_scan",
    "selective_commit", "selective_step", "selective_tree_scan",
]  # fmt: skip

Rows = tuple[Tensor, Tensor, Tensor | None]  # x, step sizes or log decays, and B where there is one


@triton.jit
def _after_node(state, rate, step, x, key, SELECTIVE: tl.constexpr):
    """Continue a state [channels, dstate] by one node.

    Mamba-1: step is dt, rate is A and key is B.  RG-LRU: step is the log decay, rate is 1 and dstate is 1.
    """
    step = step.to(tl.float32)
    x = x.to(tl.float32)
    write = (step * x)[:, None] * key.to(tl.float32)[None, :] if SELECTIVE else x[:, None]
    return state * tl.exp2(step[:, None] * rate) + write


@triton.jit
def _commit(
    state, rate, length, c, s, channels, path_ptr, step_ptr, x_ptr, B_ptr, stride_step_n, stride_x_n, stride_B_n,
    DSTATE: tl.constexpr, AHEAD: tl.constexpr, SELECTIVE: tl.constexpr,
):  # fmt: skip
    """Continue a state by the rows of a path."""
    for start in range(0, length, AHEAD):
        steps, values, keys = (), (), ()  # tuples, so that the loads of several rows are under way together
        for k in tl.static_range(AHEAD):
            is_entry = start + k < length
            row = tl.load(path_ptr + start + k, is_entry, 0)
            mask = c < tl.where(is_entry, channels, 0)
            steps += (tl.load(step_ptr + row * stride_step_n + c, mask, 0.0),)
            values += (tl.load(x_ptr + row * stride_x_n + c, mask, 0.0),)
            if SELECTIVE:
                keys += (tl.load(B_ptr + row * stride_B_n + s, s < tl.where(is_entry, DSTATE, 0), 0.0),)
        for k in tl.static_range(AHEAD):
            state = _after_node(state, rate, steps[k], values[k], keys[k] if SELECTIVE else None, SELECTIVE)
    return state


@triton.jit
def _stash(
    source_ptr, stash_ptr, bias_ptr, stride_n, stride_stash_n, column, first, n, width,
    BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Copy some columns of the new rows into a stash, as step sizes if SOFTPLUS."""
    for start in range(first, n, BLOCK_N):
        node = start + tl.arange(0, BLOCK_N)[:, None]
        mask = (node < n) & (column < width)[None, :]
        row = tl.load(source_ptr + (node - first) * stride_n + column[None, :], mask, 0.0)
        if SOFTPLUS:
            row = row.to(tl.float32)
            if bias_ptr is not None:
                row += tl.load(bias_ptr + column, column < width, 0.0).to(tl.float32)[None, :]
            row = softplus(row)
        tl.store(stash_ptr + node * stride_stash_n + column[None, :], row, mask)


@jit(fuses=True, do_not_specialize=STEP_INTEGERS)
def diagonal_kernel(
    state_ptr, rate_ptr, bias_ptr, D_ptr, walk_ptr, y_ptr,
    path_ptr, lengths_ptr, old_step_ptr, old_x_ptr, old_B_ptr,
    step_ptr, x_ptr, B_ptr, C_ptr, stash_step_ptr, stash_x_ptr, stash_B_ptr,
    n, first, new_from, path_size, channels,
    stride_state_b, stride_rate_b,
    stride_old_step_b, stride_old_step_n, stride_old_x_b, stride_old_x_n, stride_old_B_b, stride_old_B_n,
    stride_step_b, stride_step_n, stride_x_b, stride_x_n, stride_B_b, stride_B_n, stride_C_b, stride_C_n,
    stride_stash_step_b, stride_stash_step_n, stride_stash_x_b, stride_stash_x_n, stride_stash_B_b, stride_stash_B_n,
    DSTATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    SLOTS: tl.constexpr, SELECTIVE: tl.constexpr, COMMIT: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr,
    KNOWN: tl.constexpr,
):  # fmt: skip
    """Commit a path to some channels of a state and walk a tree with it; grid (blocks of channels, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    inside = c < channels
    is_state = s < DSTATE
    tile = c[:, None] * DSTATE + s[None, :]
    tile_mask = inside[:, None] & is_state[None, :]
    state_ptr += batch * stride_state_b
    state = tl.load(state_ptr + tile, tile_mask, 0.0)
    rate = 1.4426950408889634  # log2 e: decays are powers of 2
    if SELECTIVE:
        rate *= tl.load(rate_ptr + batch * stride_rate_b + tile, tile_mask, 0.0).to(tl.float32)
    if COMMIT:
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        if SELECTIVE:
            old_B_ptr += batch * stride_old_B_b
        state = _commit(
            state, rate, length, c, s, channels, path_ptr + batch * path_size,
            old_step_ptr + batch * stride_old_step_b, old_x_ptr + batch * stride_old_x_b, old_B_ptr,
            stride_old_step_n, stride_old_x_n, stride_old_B_n, DSTATE, AHEAD, SELECTIVE,
        )  # fmt: skip
        if length > 0:
            tl.debug_barrier()  # the store may spread a tile over threads in another way than the load
            tl.store(state_ptr + tile, state, tile_mask)
    if SCAN:
        step_ptr += batch * stride_step_b
        x_ptr += batch * stride_x_b
        if SELECTIVE:
            B_ptr += batch * stride_B_b
            C_ptr += batch * stride_C_b
        if KEEP:
            stash_step_ptr += batch * stride_stash_step_b
            stash_x_ptr += batch * stride_stash_x_b
            if SELECTIVE:
                stash_B_ptr += batch * stride_stash_B_b
            tl.debug_barrier()  # other threads may still read, from the same stash, the path that they commit
            _stash(
                step_ptr, stash_step_ptr, bias_ptr, stride_step_n, stride_stash_step_n, c, new_from, n, channels,
                BLOCK_N, SELECTIVE,
            )  # fmt: skip
            _stash(x_ptr, stash_x_ptr, None, stride_x_n, stride_stash_x_n, c, new_from, n, channels, BLOCK_N, False)
            if SELECTIVE and tl.program_id(0) == 0:
                _stash(B_ptr, stash_B_ptr, None, stride_B_n, stride_stash_B_n, s, new_from, n, DSTATE, BLOCK_N, False)
            tl.debug_barrier()  # the walk reads rows that other threads have stashed
            step_ptr, stride_step_n = stash_step_ptr, stride_stash_step_n
            x_ptr, stride_x_n = stash_x_ptr, stride_stash_x_n
        skip = tl.zeros((BLOCK_C,), tl.float32)
        if D_ptr is not None:
            skip += tl.load(D_ptr + c, inside, 0.0).to(tl.float32)
        y_ptr += batch * (n - first) * channels
        walk_ptr += batch * n
        slot_states = (state,) * SLOTS
        for start in range(0, n, AHEAD):
            entries, steps, values, keys, queries = (), (), (), (), ()
            for k in tl.static_range(AHEAD):
                # Beyond the last node it is visited again and nothing is stored, which costs less than masks.
                entry = tl.load(walk_ptr + tl.minimum(start + k, n - 1))
                node = entry & 0xFFFF
                entries += (entry,)
                steps += (tl.load(step_ptr + (node * stride_step_n + c), inside, 0.0),)
                values += (tl.load(x_ptr + (node * stride_x_n + c), inside, 0.0),)
                if SELECTIVE:
                    row = tl.maximum(node - new_from, 0) if KNOWN else node
                    key = tl.load(B_ptr + (row * stride_B_n + s), is_state, 0.0)
                    if KNOWN:  # of new rows the first program writes the stash meanwhile
                        is_known = s < tl.where(node < new_from, DSTATE, 0)
                        key = tl.where(
                            is_known, tl.load(stash_B_ptr + (node * stride_stash_B_n + s), is_known, 0.0), key
                        )
                    keys += (key,)
                    queries += (tl.load(C_ptr + (row * stride_C_n + s), is_state, 0.0),)
            for k in tl.static_range(AHEAD):
                node = entries[k] & 0xFFFF
                take = (entries[k] >> 16) & 0xFF
                keep = entries[k] >> 24
                if take > 0:
                    for slot in tl.static_range(SLOTS):
                        state = tl.where(take == slot + 1, slot_states[slot], state)
                state = _after_node(state, rate, steps[k], values[k], keys[k] if SELECTIVE else None, SELECTIVE)
                if keep > 0:
                    kept = ()
                    for slot in tl.static_range(SLOTS):
                        kept += (tl.where(keep == slot + 1, state, slot_states[slot]),)
                    slot_states = kept
                out = tl.sum(state * queries[k].to(tl.float32)[None, :], 1) if SELECTIVE else tl.sum(state, 1)
                if D_ptr is not None:
                    out += skip * values[k].to(tl.float32)
                is_asked = (start + k < n) & (node >= first)
                tl.store(y_ptr + ((node - first) * channels + c), out, c < tl.where(is_asked, channels, 0))


def selective_tree_scan(a: Operands) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_tree_scan", x=a.x, B=a.B, C=a.C)
    new = (a.x, a.dt, a.B)
    return _launch("selective_tree_scan", a.state, a.A, new=new, C=a.C, topology=a.topology, first=a.first, D=a.D)


def selective_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_commit", x=x, B=B)
    _launch("selective_commit", state, A, accepted=accepted, old=(x, dt, B))


def selective_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_step", x=a.x, B=a.B, C=a.C, stash_x=a.stash_x, stash_B=a.stash_B)
    stash, accepted, old = (a.stash_x, a.stash_dt, a.stash_B), a.accepted, None
    if accepted is not None:
        old = a.previous or stash
        check_kernel_dtypes("selective_step", x=a.x, old_x=old[0], old_B=old[2])
        if a.previous is None:
            _launch("selective_step", a.state, a.A, accepted=accepted, old=old)
            accepted = old = None
    return _launch(
        "selective_step", a.state, a.A, accepted=accepted, old=old, new=(a.x, a.dt, a.B), stash=stash, C=a.C,
        topology=a.topology, first=a.first, D=a.D, bias=a.dt_bias,
    )  # fmt: skip


def diagonal_tree_scan(log_a: Tensor, x: Tensor, topology: Topology, state: Tensor, *, first: int) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_tree_scan", x=x)
    return _launch("diagonal_tree_scan", state, new=(x, log_a, None), topology=topology, first=first)


def diagonal_commit(state: Tensor, log_a: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_commit", x=x)
    _launch("diagonal_commit", state, accepted=accepted, old=(x, log_a, None))


def diagonal_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_step", x=a.x, stash_x=a.stash_x)
    stash = (a.stash_x, a.stash_log_a, None)
    return _launch(
        "diagonal_step", a.state, accepted=a.accepted, old=None if a.accepted is None else stash,
        new=(a.x, a.log_a, None), stash=stash, topology=a.topology, first=a.first,
    )  # fmt: skip


def _launch(
    op: str, state: Tensor, A: Tensor | None = None, *, accepted: AcceptedPath | None = None, old: Rows | None = None,
    new: Rows | None = None, stash: Rows | None = None, C: Tensor | None = None, topology: Topology | None = None,
    first: int = 0, D: Tensor | None = None, bias: Tensor | None = None,
) -> Any:  # fmt: skip
    """Launch the kernel for a commit (accepted and old), a scan (new and topology), or both; return its outputs."""
    batch, channels = state.shape[:2]
    dstate = 1 if A is None else state.shape[2]
    check_limit(op, "a dstate", dstate, MAX_DSTATE)
    check_inner("state", state, state.ndim - 1)
    for name, tensor, dims in (("A", A, 2), ("D", D, 1), ("dt_bias", bias, 1), ("C", C, 1)):
        if tensor is not None:
            check_inner(name, tensor, dims)
    path, lengths, entries = path_operands(accepted)
    check_limit(op, "a path of nodes", entries, MAX_NODES)
    (old_x, old_step, old_B), (x, step, B), (stash_x, stash_step, stash_B) = map(_checked, (old, new, stash))
    n, walk, y, new_from = 1, None, None, first if stash is not None else 0
    if topology is not None:
        n, walk = topology.num_nodes, topology.walk
        check_limit(op, "trees of nodes", n, MAX_NODES)
        dtype = x.dtype if stash_x is None else stash_x.dtype
        y = torch.empty(batch, n - first, channels, dtype=dtype, device=x.device)
    tile = DiagonalTile.of(n, dstate, batch * channels)
    diagonal_kernel[(-(-channels // tile.channels), batch)](
        state, A, bias, D, walk, y, path, lengths, old_step, old_x, old_B, step, x, B, C, stash_step, stash_x, stash_B,
        n, first, new_from, entries, channels, state.stride(0), A.stride(0) if A is not None and A.ndim == 3 else 0,
        *strides(old_step), *strides(old_x), *strides(old_B), *strides(step), *strides(x), *strides(B), *strides(C),
        *strides(stash_step), *strides(stash_x), *strides(stash_B),
        DSTATE=dstate, BLOCK_C=tile.channels, BLOCK_S=tile.dstate, BLOCK_N=tile.nodes, AHEAD=tile.ahead,
        SLOTS=tile.slots, SELECTIVE=A is not None, COMMIT=old is not None, SCAN=new is not None,
        KEEP=stash is not None, KNOWN=new_from > 0, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _checked(rows: Rows | None) -> tuple[Any, ...]:
    """Require that every row is contiguous."""
    if rows is None:
        return None, None, None
    for name, tensor in zip(("x", "dt or log_a", "B"), rows, strict=True):
        if tensor is not None:
            check_inner(name, tensor)
    return rows
