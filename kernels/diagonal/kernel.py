"""The diagonal recurrences in Triton (Mamba-1, RG-LRU): scan of a tree, commit of a path, and both in one pass.

One program owns a block of channels of a sequence, with all their states.  It commits the path, stores the state where
there was something to commit, and visits the nodes depth first with the few states that stay in registers
(`step/walk.py`).  Channels are independent, so a program may overwrite the rows of x and of the step sizes that it
has committed.  B is read by all programs: when its new rows replace those of the path that is being committed, they are
copied after the launch; a caller who alternates between two stashes (`previous`) saves the copy.
"""

# mypy: disable-error-code="assignment, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.device_functions import STEP_INTEGERS, softplus
from stree.kernels.tiles import (
    MAX_DSTATE,
    MAX_NODES,
    DiagonalTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "diagonal_commit",
    "diagonal_step",
    "diagonal_tree_scan",
    "selective_commit",
    "selective_step",
    "selective_tree_scan",
]

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


@triton.jit(do_not_specialize=STEP_INTEGERS)
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
    KEEP_SHARED: tl.constexpr, KNOWN: tl.constexpr,
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
            if KEEP_SHARED and tl.program_id(0) == 0:
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
                    if KNOWN:
                        known = tl.load(stash_B_ptr + (node * stride_stash_B_n + s), is_state, 0.0)
                        key = tl.where(node < new_from, known, key)
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


def selective_tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    topology: Topology,
    state: Tensor,
    *,
    D: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_tree_scan", x=x, B=B, C=C)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    _launch("selective_tree_scan", state, A, new=(x, dt, B), C=C, topology=topology, y=y, D=D, first=first)
    return y


def selective_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_commit", x=x, B=B)
    _launch("selective_commit", state, A, old=(x, dt, B), accepted=accepted)


def selective_step(
    state: Tensor,
    stash_x: Tensor,
    stash_dt: Tensor,
    stash_B: Tensor,
    accepted: AcceptedPath | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    topology: Topology,
    *,
    D: Tensor | None = None,
    first: int = 0,
    previous: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_step", x=x, B=B, C=C, stash_x=stash_x, stash_B=stash_B)
    y = torch.empty(x.shape, dtype=stash_x.dtype, device=x.device)
    old = None
    if accepted is not None:
        old = (stash_x, stash_dt, stash_B) if previous is None else previous
        check_kernel_dtypes("selective_step", x=x, old_x=old[0], old_B=old[2])
    in_place = accepted is not None and previous is None
    _launch(
        "selective_step", state, A, old=old, accepted=accepted, new=(x, dt, B), C=C, topology=topology, y=y, D=D,
        bias=dt_bias, stash=(stash_x, stash_dt, stash_B), keep_shared=not in_place, first=first,
    )  # fmt: skip
    if in_place:
        stash_B[:, first : first + B.shape[1]].copy_(B)
    return y


def diagonal_tree_scan(log_a: Tensor, x: Tensor, topology: Topology, state: Tensor, *, first: int = 0) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_tree_scan", x=x)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    _launch("diagonal_tree_scan", state, new=(x, log_a, None), topology=topology, y=y, first=first)
    return y


def diagonal_commit(state: Tensor, log_a: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_commit", x=x)
    _launch("diagonal_commit", state, old=(x, log_a, None), accepted=accepted)


def diagonal_step(
    state: Tensor,
    stash_log_a: Tensor,
    stash_x: Tensor,
    accepted: AcceptedPath | None,
    log_a: Tensor,
    x: Tensor,
    topology: Topology,
    *,
    first: int = 0,
) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_step", x=x, stash_x=stash_x)
    y = torch.empty(x.shape, dtype=stash_x.dtype, device=x.device)
    stash = (stash_x, stash_log_a, None)
    _launch(
        "diagonal_step", state, old=None if accepted is None else stash,
        accepted=accepted,
        new=(x, log_a, None), topology=topology, y=y, stash=stash, first=first,
    )  # fmt: skip
    return y


def _launch(
    op: str,
    state: Tensor,
    A: Tensor | None = None,
    *,
    old: Rows | None = None,
    accepted: AcceptedPath | None = None,
    new: Rows | None = None,
    C: Tensor | None = None,
    topology: Topology | None = None,
    y: Tensor | None = None,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    stash: Rows | None = None,
    keep_shared: bool = False,
    first: int = 0,
) -> None:
    """Launch the kernel for a commit (old and accepted), a scan (new, topology and y), or both."""
    batch, channels = state.shape[:2]
    dstate = 1 if A is None else state.shape[2]
    check_limit(op, "a dstate", dstate, MAX_DSTATE)
    check_inner("state", state, state.ndim - 1)
    for name, tensor, dims in (("A", A, 2), ("D", D, 1), ("dt_bias", bias, 1), ("C", C, 1)):
        if tensor is not None:
            check_inner(name, tensor, dims)
    n, path_size, walk = 1, 1, None
    if old is not None:
        assert accepted is not None, "a commit needs the accepted path"
        path_size = accepted.rows.shape[1]
    if new is not None:
        assert topology is not None, "a scan needs a topology"
        n, walk = topology.num_nodes, topology.depth_first_walk()
    check_limit(op, "trees of nodes", n, MAX_NODES)
    check_limit(op, "a path of nodes", path_size, MAX_NODES)
    tile = DiagonalTile.of(n, dstate, batch * channels)
    new_from = first if stash is not None else 0
    old_x, old_step, old_B = _checked(old)
    x, step, B = _checked(new)
    stash_x, stash_step, stash_B = _checked(stash)
    diagonal_kernel[(-(-channels // tile.channels), batch)](
        state, A, bias, D, walk, y,
        None if accepted is None else accepted.rows, None if accepted is None else accepted.lengths,
        old_step, old_x, old_B, step, x, B, C, stash_step, stash_x, stash_B,
        n, first, new_from, path_size, channels,
        state.stride(0), A.stride(0) if A is not None and A.ndim == 3 else 0,
        *_strides(old_step), *_strides(old_x), *_strides(old_B),
        *_strides(step), *_strides(x), *_strides(B), *_strides(C),
        *_strides(stash_step), *_strides(stash_x), *_strides(stash_B),
        **diagonal_constants(
            tile, dstate, selective=A is not None, commit=old is not None, scan=new is not None,
            keep=stash is not None, keep_shared=keep_shared, known=new_from > 0,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def diagonal_constants(
    tile: DiagonalTile,
    dstate: int,
    *,
    selective: bool,
    commit: bool,
    scan: bool,
    keep: bool,
    keep_shared: bool,
    known: bool,
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "DSTATE": dstate, "BLOCK_C": tile.channels, "BLOCK_S": tile.dstate, "BLOCK_N": tile.nodes,
        "AHEAD": tile.ahead, "SLOTS": tile.slots, "SELECTIVE": selective, "COMMIT": commit, "SCAN": scan, "KEEP": keep,
        "KEEP_SHARED": keep and keep_shared and selective, "KNOWN": known,
    }  # fmt: skip


def _checked(rows: Rows | None) -> Rows | tuple[None, None, None]:
    """Require that every row is contiguous."""
    if rows is None:
        return None, None, None
    for name, tensor in zip(("x", "dt or log_a", "B"), rows, strict=True):
        if tensor is not None:
            check_inner(name, tensor)
    return rows


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Take the strides over batch and nodes; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
