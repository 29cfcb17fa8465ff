"""Every operation on token trees in plain torch: the specification that the Triton kernels are measured against.

There are two kinds of recurrence.  A *matrix state*, S_i = decay_i S_parent + k_i u_i^T, carries Mamba-2, gated
DeltaNet, KDA and lightning attention (`matrix_tree`, `matrix_commit`); a *diagonal state*,
h_i = a_i h_parent + x_i, carries Mamba-1 and RG-LRU (`diagonal_tree`, `diagonal_fold`).  The rest are thin layers
over these, plus the short convolution and attention.  `kernels/README.md` derives the closed forms;
`stree.kernels.ops` documents arguments and checks them: this module trusts its callers.

Accumulation, decays and states are float32, float64 where inputs are float64.  No function reads the device, loops
over nodes, heads or sequences, or has a shape that depends on data.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.topology import AcceptedPath, Topology

Parents = Tensor | Topology
Path = Tensor | AcceptedPath


def _accumulator(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a result for this input is accumulated."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _nodes_first(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn [batch, heads, n, ...] into contiguous [batch, n, heads, ...] of the given dtype."""
    return heads.transpose(1, 2).to(dtype).contiguous()


# The matrix state.


def _path_decays(log_decay: Tensor, topology: Topology, first: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Compute e^{G_i} as [b, n - first, h(, s)] and e^{G_i - G_j} as [b, h, n - first, n(, s)], 0 off the path.

    G sums log decays along root paths in float64: a difference of two float32 sums loses the small decays that
    follow a strong one.  The exponent is masked before exp because G_i - G_j may be positive off the path.  A single
    node's only pair is itself, with decay 1: None.
    """
    batch, n = log_decay.shape[:2]
    if n == 1:
        return log_decay.to(dtype).exp(), None
    sums = torch.bmm(topology.path_sum, log_decay.double().flatten(2)).view(log_decay.shape)
    heads = sums.transpose(1, 2)  # [b, h, n(, s)]
    pair = heads[:, :, first:, None] - heads[:, :, None]
    hidden = topology.hidden[:, None, first:]
    pair.masked_fill_(hidden if log_decay.ndim == 3 else hidden[..., None], -torch.inf)
    return sums[:, first:].to(dtype).exp(), pair.to(dtype).exp_()


def matrix_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    state: Tensor,
    topology: Topology,
    *,
    beta: Tensor | None = None,
    known: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Run S_i = e^{g_i} S_parent + k_i u_i^T along every root path and read o_i = S_i^T q_i.

    Without `beta` the writes are given, u = value.  With it they follow the delta rule,
    u_i = beta_i (v_i - e^{g_i} S_parent^T k_i), which is the unit lower triangular system of DESIGN 5; it is solved
    by substitution, because the product of doublings loses all digits when keys repeat.

    Args:
        query: [b, n - first, g, s]; g divides h.
        key: [b, n, g, s].
        value: [b, n, h, p]; with `beta`, [b, n - first, h, p].
        log_decay: [b, n, h], or [b, n, h, s] for a decay per key channel.
        state: [b, h, s, p], any strides; read, never written.
        topology: the trees.
        beta: [b, n - first, h] or None.
        known: [b, first, h, p], u of the nodes below `first`; with `beta` and first > 0.
        first: rows below it are inputs only.

    Returns:
        o as [b, h, n - first, p] and u as [b, h, n, p].
    """
    batch, n, groups, dstate = key.shape
    heads, headdim = state.shape[1], state.shape[3]
    rows, shared = n - first, heads // groups
    from_root, pair = _path_decays(log_decay, topology, first, state.dtype)
    # The delta rule reads the state with keys exactly as outputs read it with queries: one product serves both.
    probe = query[:, None] if beta is None else torch.stack((key[:, first:], query), 1)  # [b, t, rows, g, s]
    kinds = probe.shape[1]
    scale = from_root.view(batch, 1, rows, groups, shared, -1)
    seen = (probe.unsqueeze(4) * scale).view(batch, kinds * rows, heads, dstate).transpose(1, 2) @ state
    if log_decay.ndim == 3:
        scores = probe.reshape(batch, kinds * rows, groups, dstate).transpose(1, 2) @ key.permute(0, 2, 3, 1)
        weight = scores.view(batch, groups, 1, kinds, rows, n)
        if pair is None:
            weight = weight.expand(-1, -1, shared, -1, -1, -1)
        else:
            weight = weight * pair.view(batch, groups, shared, 1, rows, n)
        weight = weight.reshape(batch, heads, kinds * rows, n)
    else:
        weight = _channel_scores(probe, key, pair, shared)
    if beta is None:
        written = value.transpose(1, 2)
    else:
        strength = beta.transpose(1, 2)[..., None]
        target = strength * (value.transpose(1, 2) - seen[:, :, :rows])
        coupling = strength * weight[:, :, :rows]
        written = _substitute(coupling, target, None if known is None else known.transpose(1, 2))
        seen, weight = seen[:, :, rows:], weight[:, :, rows:]
    out = torch.baddbmm(
        seen.reshape(-1, rows, headdim), weight.reshape(-1, rows, n), written.reshape(batch * heads, n, headdim)
    )
    return out.view(batch, heads, rows, headdim), written


def _channel_scores(probe: Tensor, key: Tensor, pair: Tensor | None, shared: int) -> Tensor:
    """Compute sum_c probe_ic e^{G_ic - G_jc} key_jc as [b, h, t * rows, n]; takes b h n^2 s floats of memory."""
    batch, kinds, rows = probe.shape[:3]
    key = key.transpose(1, 2).repeat_interleave(shared, 1)[:, :, None]  # [b, h, 1, n, s]
    probe = probe.permute(0, 3, 2, 4, 1).repeat_interleave(shared, 1)  # [b, h, rows, s, t]
    decayed = key if pair is None else pair * key
    return (decayed @ probe).permute(0, 1, 4, 2, 3).reshape(batch, key.shape[1], kinds * rows, -1)


def _substitute(coupling: Tensor, target: Tensor, known: Tensor | None) -> Tensor:
    """Solve (I + strictly lower part of coupling) u = target by substitution, given u of the first rows."""
    if known is not None:
        first = known.shape[2]
        target, coupling = target - coupling[..., :first] @ known, coupling[..., first:]
    solved: Tensor = torch.linalg.solve_triangular(coupling, target, upper=False, unitriangular=True)
    return solved if known is None else torch.cat((known, solved), 2)


def matrix_commit(state: Tensor, left: Tensor, right: Tensor, log_decay: Tensor, accepted: AcceptedPath) -> None:
    """Fold a path into a matrix state: S = e^{G_m} S + sum_j (e^{G_m - G_j} left_j) right_j^T, in place.

    The one commit formula for every matrix state.  An empty path multiplies by 1 and subtracts +0.0, which keeps
    every bit, the sign of zeros included.

    Args:
        state: [b, h, i, j], written.
        left: [b, m, h, i], the side that has its own rows for each head.
        right: [b, m, g, j]; g divides h.
        log_decay: [b, m, h], or [b, m, h, i] for a decay per row; zero past the length.
        accepted: the path that left and right were taken by.
    """
    batch, m, heads = log_decay.shape[:3]
    groups = right.shape[2]
    if m == 1:
        total = log_decay.to(state.dtype)
        left = left.neg()
    else:
        sums = log_decay.double().cumsum(1)
        total = sums[:, -1].to(state.dtype)
        later = (sums[:, -1:] - sums).to(state.dtype).exp_()
        left = left * (later if log_decay.ndim == 4 else later[..., None]).neg_()
    left = left.masked_fill_(accepted.beyond[..., None, None], 0)
    left = left.view(batch, m, groups, -1).permute(0, 2, 3, 1)  # [b, g, (h / g) i, m]
    update = torch.matmul(left, right.transpose(1, 2))
    state.mul_(total.exp().view(batch, heads, -1, 1)).sub_(update.view(state.shape))


def ssd_tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    parents: Parents,
    state: Tensor,
    *,
    D: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Run the Mamba-2 recurrence: a matrix state with k = B, u = dt x, q = C and log decay dt A."""
    topology = Topology.cast(parents)
    dtype = state.dtype
    key, query = B.to(dtype), C[:, first:].to(dtype)
    y, _ = matrix_tree(query, key, x * dt[..., None], dt * A, state.transpose(2, 3), topology, first=first)
    y = y.transpose(1, 2)
    if D is not None:
        y = torch.addcmul(y, x[:, first:].to(dtype), D.to(dtype)[:, None])
    return y.to(x.dtype).contiguous()


def ssd_commit(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, path: Path, path_lengths: Tensor | None
) -> None:
    """Fold the accepted path of a Mamba-2 layer into its state, in place."""
    accepted = AcceptedPath.cast(path, path_lengths)
    _ssd_fold(state, accepted.take(x), accepted.take(dt), A, accepted.take(B), accepted)


def _ssd_fold(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Do the work of `ssd_commit` on rows taken along the path."""
    log_decay = dt * (A if A.ndim == 1 else A[:, None])
    matrix_commit(state, x * dt[..., None], B.to(state.dtype), log_decay, accepted)


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
) -> Tensor:
    """Fold the last path, stash x, B, C and dt of the new rows, scan the new tree."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        x, B, _ = _split_xbc(accepted.take(stash_xbc), headdim, ngroups, A.shape[0])
        _ssd_fold(state, x, accepted.take(stash_dt), A, B, accepted)
    stash_xbc[:, first:n].copy_(xbc)
    step_size = dt.to(stash_dt.dtype)
    step_size = F.softplus(step_size if dt_bias is None else step_size + dt_bias)
    if dt_limit != (0.0, float("inf")):
        step_size = step_size.clamp(*dt_limit)
    stash_dt[:, first:n].copy_(step_size)
    x, B, C = _split_xbc(stash_xbc[:, :n], headdim, ngroups, A.shape[0])
    return ssd_tree_scan(x, stash_dt[:, :n], A, B, C, topology, state, D=D, first=first)


def _split_xbc(xbc: Tensor, headdim: int, ngroups: int, nheads: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the channels after the convolution as x[b, n, h, p], B[b, n, g, s] and C[b, n, g, s]."""
    inner = nheads * headdim
    span = (xbc.shape[2] - inner) // 2
    shape = (*xbc.shape[:2], ngroups, -1)
    x, B, C = xbc[..., :inner], xbc[..., inner : inner + span], xbc[..., inner + span :]
    return x.view(*xbc.shape[:2], nheads, headdim), B.view(shape), C.view(shape)


# The short convolution.


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Parents,
    window: Tensor,
    *,
    activation: str | None = "silu",
    first: int = 0,
) -> Tensor:
    """Convolve every node with its last ancestors, then with the stored window."""
    batch, n, channels = x.shape
    width = weight.shape[1]
    dtype = _accumulator(x)
    rows = torch.cat((window.transpose(1, 2), x), 1).to(dtype)  # [b, width - 1 + n, c]
    if n > 1:  # the rows of a single node are the window and itself, already in order
        index = Topology.cast(parents).conv_rows(width)[:, first:].reshape(batch, -1, 1)
        rows = rows.gather(1, index.expand(-1, -1, channels))
    y = (rows.view(batch, n - first, width, channels) * weight.t().to(dtype)).sum(2)
    if bias is not None:
        y += bias
    if activation == "silu":
        F.silu(y, inplace=True)
    return y.to(x.dtype)


def conv_commit(window: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None) -> None:
    """Move the accepted rows into the window of a convolution, in place."""
    batch, channels, history = window.shape
    accepted = AcceptedPath.cast(path, path_lengths, history + 1)
    if accepted.conv_from is None or accepted.conv_rows is None or accepted.conv_keeps is None:
        return  # no window, or no path
    kept = window.gather(2, accepted.conv_from[:, None].expand(-1, channels, -1))
    entered = x.gather(1, accepted.conv_rows[..., None].expand(-1, -1, channels)).transpose(1, 2)
    torch.where(accepted.conv_keeps, kept, entered.to(window.dtype), out=window)


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
) -> Tensor:
    """Fold the last path, stash the new rows before the convolution, convolve the new tree."""
    n = (parents.parents if isinstance(parents, Topology) else parents).shape[1]
    if path is not None:
        conv_commit(window, stash, path, path_lengths)
    stash[:, first:n].copy_(x)
    return tree_conv1d(stash[:, :n], weight, bias, parents, window, activation=activation, first=first)


# Attention.


def _hidden_keys(topology: Topology, lengths: Tensor, context: int, window: int | None, first: int) -> Tensor:
    """Mark what each node may not attend to among [cache rows, nodes]: bool[b, n - first, context + n]."""
    depths = topology.depths
    row = torch.arange(context, device=lengths.device)
    outside = (row >= lengths[:, None])[:, None]
    tree = topology.hidden[:, first:]
    if window is not None:
        depth = depths[:, first:, None]
        outside = outside | (lengths[:, None, None] + depth - row >= window)
        tree = tree | (depth - depths[:, None] >= window)
    return torch.cat((outside.expand(-1, tree.shape[1], -1), tree), 2)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Parents,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Attend from every node to the cached context and to its own ancestors."""
    batch, rows, heads, _ = q.shape
    kv_heads, context = k_cache.shape[1:3]
    n = k.shape[1]
    dtype = _accumulator(q)
    shared = heads // kv_heads
    query = q.to(dtype).mul(scale).view(batch, rows, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, kv_heads, shared * rows, -1)
    past = query @ k_cache.to(dtype).transpose(2, 3)
    tree = query @ k.to(dtype).permute(0, 2, 3, 1)
    scores = torch.cat((past, tree), 3)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    hidden = _hidden_keys(Topology.cast(parents), lengths, context, window, first)
    scores = scores.view(batch, heads, rows, context + n).masked_fill_(hidden[:, None], -torch.inf)
    probs = scores.softmax(3).view(batch, kv_heads, shared * rows, context + n)
    out = probs[..., :context] @ v_cache.to(dtype) + probs[..., context:] @ v.to(dtype).transpose(1, 2)
    return _nodes_first(out.view(batch, heads, rows, -1), q.dtype)


def kv_commit(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    path: Path,
    path_lengths: Tensor | None,
) -> None:
    """Append the accepted rows of K and V to the caches, in place; `lengths` is left to its owner.

    Rows that have no place write back what the cache holds at (lengths + t) mod L, which is a different row for
    every t, so no two writes meet.
    """
    accepted = AcceptedPath.cast(path, path_lengths)
    limit = k_cache.shape[2]
    m = min(accepted.rows.shape[1], limit)
    place = lengths.long()[:, None] + torch.arange(m, device=lengths.device)
    stays = (accepted.beyond[:, :m] | (place >= limit))[:, None, :, None]
    place = place.remainder_(limit)[:, None, :, None]
    source = accepted.rows[:, :m, None, None]
    for cache, nodes in ((k_cache, k), (v_cache, v)):
        rows = nodes.gather(1, source.expand(-1, -1, *nodes.shape[2:])).transpose(1, 2).to(cache.dtype)
        index = place.expand_as(rows)
        cache.scatter_(2, index, torch.where(stays, cache.gather(2, index), rows))


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
) -> Tensor:
    """Append the last path's K and V, stash those of the new rows, attend; `lengths` counts the appended rows."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        kv_commit(k_cache, v_cache, lengths - accepted.lengths, stash_k, stash_v, accepted, None)
    stash_k[:, first:n].copy_(k)
    stash_v[:, first:n].copy_(v)
    return tree_attention(
        q,
        k_cache,
        v_cache,
        lengths,
        stash_k[:, :n],
        stash_v[:, :n],
        topology,
        scale=scale,
        window=window,
        softcap=softcap,
        first=first,
    )
