"""The fused steps of the front door: fold the last path, stash the new rows, scan the new tree.

Everything common to them is said in `stree.kernels.ops`, which exports them.
"""

from __future__ import annotations

from torch import Tensor

from stree.kernels.checks import (
    Backend,
    Parents,
    Path,
    check,
    check_attention,
    check_conv,
    check_divides,
    check_rank,
    check_room,
    choose,
    state_kind,
    take_path,
    take_topology,
)


def ssd_step(
    state: Tensor,
    stash_xbc: Tensor,
    stash_dt: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    parents: Parents,
    *,
    headdim: int,
    ngroups: int,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    first: int = 0,
    folded: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Fold the last path of a Mamba-2 layer, stash the new rows, scan the new tree.

    Args:
        state: float32[b, h, p, s], written by the fold.
        stash_xbc: float[b, N, h * p + 2 * g * s], rows after the convolution: x, then B, then C; written.
        stash_dt: float32[b, N, h], step sizes after bias, softplus and limit; written.
        path: accepted nodes of the tree that the stash holds, or None for no fold.
        path_lengths: their number, root included.
        xbc: float[b, n - first, h * p + 2 * g * s], new rows.
        dt: float[b, n - first, h], new step sizes as projected.
        A: float[h], negative.
        dt_bias: float[h] or None.
        parents: the new trees.
        headdim: p.
        ngroups: g.
        D: float[h] or None.
        dt_limit: bounds of the step size after softplus.
        first: first new row; rows below it stand in the stash from earlier calls.
        folded: a second pair like (stash_xbc, stash_dt) that `path` is folded from, read only; None: from the stash
            itself.  A caller who alternates between two pairs saves the Triton version a launch.
        backend: see `stree.kernels.ops`.

    Returns:
        float[b, n - first, h, p], dtype of stash_xbc, contiguous.
    """
    check_rank("state", state, "b h p s")
    batch, heads, _, dstate = state.shape
    topology = take_topology(parents, batch, first, state)
    rows, room = topology.parents.shape[1] - first, stash_xbc.shape[1]
    width = heads * headdim + 2 * ngroups * dstate
    check_divides("ngroups", ngroups, "heads of state", heads)
    check("state", state, state_kind(xbc), (batch, heads, headdim, dstate), state)
    check("stash_xbc", stash_xbc, "float", (batch, room, width), state)
    check("stash_dt", stash_dt, state_kind(xbc), (batch, room, heads), state)
    check("xbc", xbc, "float", (batch, rows, width), state)
    check("dt", dt, "float", (batch, rows, heads), state)
    check("A", A, "float", (heads,), state)
    for name, tensor in (("dt_bias", dt_bias), ("D", D)):
        if tensor is not None:
            check(name, tensor, "float", (heads,), state)
    check_room(room, topology)
    if folded is not None:
        check("folded[0]", folded[0], "float", (batch, folded[0].shape[1], width), state)
        check("folded[1]", folded[1], state_kind(xbc), (batch, folded[0].shape[1], heads), state)
    accepted = None if path is None else take_path(path, path_lengths, batch, state)
    step = choose("ssd_step", backend, state)
    out: Tensor = step(
        state,
        stash_xbc,
        stash_dt,
        accepted,
        None,
        xbc,
        dt,
        A,
        dt_bias,
        topology,
        headdim=headdim,
        ngroups=ngroups,
        D=D,
        dt_limit=dt_limit,
        first=first,
        folded=folded,
    )
    return out


def gated_delta_step(
    state: Tensor,
    stash_k: Tensor,
    stash_u: Tensor,
    stash_g: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    parents: Parents,
    *,
    scale: float | None = None,
    first: int = 0,
    folded: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Fold the last path of a gated delta layer, stash the new rows, scan the new tree, stash its u.

    Args:
        state: float32[b, hv, dk, dv], written by the fold.
        stash_k: float[b, N, hk, dk], written.
        stash_u: float[b, N, hv, dv], written.
        stash_g: float[b, N, hv] or float[b, N, hv, dk], float32 as a rule; written.
        path: accepted nodes of the tree that the stash holds, or None for no fold.
        path_lengths: their number, root included.
        q: float[b, n - first, hk, dk], new rows, normalised.
        k: float[b, n - first, hk, dk], new rows, normalised.
        v: float[b, n - first, hv, dv], new rows.
        g: float[b, n - first, hv] or float[b, n - first, hv, dk], new log decays.
        beta: float[b, n - first, hv], new rows.
        parents: the new trees.
        scale: factor on the outputs; dk ** -0.5 if None.
        first: first new row; rows below it stand in the stash from earlier calls.
        folded: a second triple like (stash_k, stash_u, stash_g) that `path` is folded from, read only; None: from the
            stash itself.  A caller who alternates between two triples saves the Triton version a launch.
        backend: see `stree.kernels.ops`.

    Returns:
        float[b, n - first, hv, dv], dtype of v, contiguous.
    """
    check_rank("state", state, "b hv dk dv")
    check_rank("stash_k", stash_k, "b N hk dk")
    batch, heads, dk, dv = state.shape
    topology = take_topology(parents, batch, first, state)
    rows, (room, key_heads) = topology.parents.shape[1] - first, stash_k.shape[1:3]
    channels = (dk,) if g.ndim == 4 else ()
    check_divides("heads of stash_k", key_heads, "heads of state", heads)
    check("state", state, state_kind(v), (batch, heads, dk, dv), state)
    check("stash_k", stash_k, "float", (batch, room, key_heads, dk), state)
    check("stash_u", stash_u, "float", (batch, room, heads, dv), state)
    check("stash_g", stash_g, "float", (batch, room, heads, *channels), state)
    check("q", q, "float", (batch, rows, key_heads, dk), state)
    check("k", k, "float", (batch, rows, key_heads, dk), state)
    check("v", v, "float", (batch, rows, heads, dv), state)
    check("g", g, "float", (batch, rows, heads, *channels), state)
    check("beta", beta, "float", (batch, rows, heads), state)
    check_room(room, topology)
    if folded is not None:
        old = folded[0].shape[1]
        check("folded[0]", folded[0], "float", (batch, old, key_heads, dk), state)
        check("folded[1]", folded[1], "float", (batch, old, heads, dv), state)
        check("folded[2]", folded[2], "float", (batch, old, heads, *channels), state)
    accepted = None if path is None else take_path(path, path_lengths, batch, state)
    step = choose("gated_delta_step", backend, state)
    out: Tensor = step(
        state,
        stash_k,
        stash_u,
        stash_g,
        accepted,
        None,
        q,
        k,
        v,
        g,
        beta,
        topology,
        scale=scale,
        first=first,
        folded=folded,
    )
    return out


def selective_step(
    state: Tensor,
    stash_x: Tensor,
    stash_dt: Tensor,
    stash_B: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    parents: Parents,
    *,
    D: Tensor | None = None,
    first: int = 0,
    folded: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Fold the last path of a Mamba-1 layer, stash the new rows, scan the new tree.

    Args:
        state: float32[b, c, s], written by the fold.
        stash_x: float[b, N, c], written.
        stash_dt: float32[b, N, c], step sizes after bias and softplus; written.
        stash_B: float[b, N, s], written.
        path: accepted nodes of the tree that the stash holds, or None for no fold.
        path_lengths: their number, root included.
        x: float[b, n - first, c], new rows after the convolution.
        dt: float[b, n - first, c], new step sizes as projected.
        A: float[c, s], negative.
        B: float[b, n - first, s], new rows.
        C: float[b, n - first, s], new rows.
        dt_bias: float[c], or None where the projection has added it.
        parents: the new trees.
        D: float[c] or None.
        first: first new row; rows below it stand in the stash from earlier calls.
        folded: a second triple like (stash_x, stash_dt, stash_B) that `path` is folded from, read only; None: from the
            stash itself.  A caller who alternates between two triples saves the Triton version a launch.
        backend: see `stree.kernels.ops`.

    Returns:
        float[b, n - first, c], dtype of stash_x.
    """
    check_rank("state", state, "b c s")
    check_rank("stash_x", stash_x, "b N c")
    batch, channels, dstate = state.shape
    topology = take_topology(parents, batch, first, state)
    rows, room = topology.parents.shape[1] - first, stash_x.shape[1]
    check("state", state, state_kind(x), (batch, channels, dstate), state)
    check("stash_x", stash_x, "float", (batch, room, channels), state)
    check("stash_dt", stash_dt, state_kind(x), (batch, room, channels), state)
    check("stash_B", stash_B, "float", (batch, room, dstate), state)
    check("x", x, "float", (batch, rows, channels), state)
    check("dt", dt, "float", (batch, rows, channels), state)
    check("A", A, "float", (channels, dstate), state)
    check("B", B, "float", (batch, rows, dstate), state)
    check("C", C, "float", (batch, rows, dstate), state)
    for name, tensor in (("dt_bias", dt_bias), ("D", D)):
        if tensor is not None:
            check(name, tensor, "float", (channels,), state)
    check_room(room, topology)
    if folded is not None:
        check("folded[0]", folded[0], "float", (batch, folded[0].shape[1], channels), state)
        check("folded[1]", folded[1], state_kind(x), (batch, folded[0].shape[1], channels), state)
        check("folded[2]", folded[2], "float", (batch, folded[0].shape[1], dstate), state)
    accepted = None if path is None else take_path(path, path_lengths, batch, state)
    step = choose("selective_step", backend, state)
    out: Tensor = step(
        state,
        stash_x,
        stash_dt,
        stash_B,
        accepted,
        None,
        x,
        dt,
        A,
        B,
        C,
        dt_bias,
        topology,
        D=D,
        first=first,
        folded=folded,
    )
    return out


def diagonal_step(
    state: Tensor,
    stash_log_a: Tensor,
    stash_x: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    log_a: Tensor,
    x: Tensor,
    parents: Parents,
    *,
    first: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Fold the last path of a diagonal recurrence, stash the new rows, scan the new tree.

    Args:
        state: float32[b, c], written by the fold.
        stash_log_a: float32[b, N, c], written.
        stash_x: float[b, N, c], written.
        path: accepted nodes of the tree that the stash holds, or None for no fold.
        path_lengths: their number, root included.
        log_a: float[b, n - first, c], new rows, at most 0.
        x: float[b, n - first, c], new rows.
        parents: the new trees.
        first: first new row; rows below it stand in the stash from earlier calls.
        backend: see `stree.kernels.ops`.

    Returns:
        float[b, n - first, c], dtype of stash_x, contiguous.
    """
    check_rank("state", state, "b c")
    check_rank("stash_x", stash_x, "b N c")
    batch, channels = state.shape
    topology = take_topology(parents, batch, first, state)
    rows, room = topology.parents.shape[1] - first, stash_x.shape[1]
    check("state", state, state_kind(x), (batch, channels), state)
    check("stash_log_a", stash_log_a, "float", (batch, room, channels), state)
    check("stash_x", stash_x, "float", (batch, room, channels), state)
    check("log_a", log_a, "float", (batch, rows, channels), state)
    check("x", x, "float", (batch, rows, channels), state)
    check_room(room, topology)
    accepted = None if path is None else take_path(path, path_lengths, batch, state)
    step = choose("diagonal_step", backend, state)
    out: Tensor = step(state, stash_log_a, stash_x, accepted, None, log_a, x, topology, first=first)
    return out


def conv_step(
    window: Tensor,
    stash: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Parents,
    *,
    activation: str | None = "silu",
    first: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Fold the last path into the window, stash the new rows, convolve the new tree.

    Args:
        window: float[b, c, w - 1], written by the fold.
        stash: float[b, N, c], rows before the convolution; written.
        path: accepted nodes of the tree that the stash holds, or None for no fold.
        path_lengths: their number, root included.
        x: float[b, n - first, c], new rows.
        weight: float[c, w].
        bias: float[c] or None.
        parents: the new trees.
        activation: "silu" or None.
        first: first new row; rows below it stand in the stash from earlier calls.
        backend: see `stree.kernels.ops`.

    Returns:
        float[b, n - first, c], dtype of stash.
    """
    check_rank("stash", stash, "b N c")
    batch, room, channels = stash.shape
    check_conv(window, weight, bias, activation, (batch, channels), stash)
    topology = take_topology(parents, batch, first, stash)
    check("x", x, "float", (batch, topology.parents.shape[1] - first, channels), stash)
    check_room(room, topology)
    accepted = None if path is None else take_path(path, path_lengths, batch, stash, weight.shape[1])
    step = choose("conv_step", backend, stash)
    out: Tensor = step(window, stash, accepted, None, x, weight, bias, topology, activation=activation, first=first)
    return out


def attention_step(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Parents,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Append the last path's K and V to the caches, stash those of the new rows, attend from the new tree.

    `lengths` is the length *after* the folded path: the fold writes rows lengths - path_lengths .. lengths - 1.

    Args:
        k_cache: float[b, hk, L, d], written by the fold.
        v_cache: float[b, hk, L, dv], written by the fold.
        lengths: int32[b], rows in use once the path is folded; read, never written.
        stash_k: float[b, N, hk, d], written.
        stash_v: float[b, N, hk, dv], written.
        path: accepted nodes of the tree that the stash holds, or None for no fold.
        path_lengths: their number, root included.
        q: float[b, n - first, hq, d].
        k: float[b, n - first, hk, d], new rows.
        v: float[b, n - first, hk, dv], new rows.
        parents: the new trees.
        scale: see `tree_attention`.
        window: see `tree_attention`.
        softcap: see `tree_attention`.
        first: first new row; rows below it stand in the stash from earlier calls.
        backend: see `stree.kernels.ops`.

    Returns:
        float[b, n - first, hq, dv], dtype of q, contiguous.
    """
    check_rank("q", q, "b n-first hq d")
    batch = q.shape[0]
    topology = take_topology(parents, batch, first, q)
    rows, room = topology.parents.shape[1] - first, stash_k.shape[1]
    check_attention(q, k_cache, v_cache, lengths, rows)
    kv_heads, dim, value_dim = k_cache.shape[1], q.shape[3], v_cache.shape[3]
    check("stash_k", stash_k, "float", (batch, room, kv_heads, dim), q)
    check("stash_v", stash_v, "float", (batch, room, kv_heads, value_dim), q)
    check("k", k, "float", (batch, rows, kv_heads, dim), q)
    check("v", v, "float", (batch, rows, kv_heads, value_dim), q)
    check_room(room, topology)
    accepted = None if path is None else take_path(path, path_lengths, batch, q)
    step = choose("attention_step", backend, q)
    out: Tensor = step(
        k_cache,
        v_cache,
        lengths,
        stash_k,
        stash_v,
        accepted,
        None,
        q,
        k,
        v,
        topology,
        scale=scale,
        window=window,
        softcap=softcap,
        first=first,
    )
    return out
