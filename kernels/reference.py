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

from stree.kernels.topology import AcceptedPath, Topology, take_rows

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
    heads = sums.transpose(1, 2).contiguous()  # [b, h, n(, s)]: what follows keeps nodes innermost, as products want
    pair = heads[:, :, first:, None] - heads[:, :, None]
    hidden = topology.hidden[:, None, first:]
    pair.masked_fill_(hidden if log_decay.ndim == 3 else hidden[..., None], -torch.inf)
    return sums[:, first:].to(dtype).exp_(), pair.to(dtype).exp_()


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
    seen = (probe.unsqueeze(4) * scale).reshape(batch, kinds * rows, heads, dstate).transpose(1, 2) @ state
    score = _head_scores if log_decay.ndim == 3 else _channel_scores
    weight = score(probe, key, pair, shared)  # [b, h, t * rows, n]
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


def _head_scores(probe: Tensor, key: Tensor, pair: Tensor | None, shared: int) -> Tensor:
    """Compute e^{G_i - G_j} (probe_i . key_j) as [b, h, t * rows, n]."""
    batch, kinds, rows, groups, dstate = probe.shape
    n = key.shape[1]
    scores = probe.reshape(batch, kinds * rows, groups, dstate).transpose(1, 2) @ key.permute(0, 2, 3, 1)
    scores = scores.view(batch, groups, 1, kinds, rows, n)
    if pair is None:
        scores = scores.expand(-1, -1, shared, -1, -1, -1)
    else:
        scores = scores * pair.view(batch, groups, shared, 1, rows, n)
    return scores.reshape(batch, groups * shared, kinds * rows, n)


def _channel_scores(probe: Tensor, key: Tensor, pair: Tensor | None, shared: int) -> Tensor:
    """Compute sum_c probe_ic e^{G_ic - G_jc} key_jc as [b, h, t * rows, n]; takes b h n^2 s floats of memory."""
    batch, kinds, rows = probe.shape[:3]
    key = key.transpose(1, 2).repeat_interleave(shared, 1)[:, :, None]  # [b, h, 1, n, s]
    probe = probe.permute(0, 3, 2, 4, 1).repeat_interleave(shared, 1)  # [b, h, rows, s, t]
    decayed = key if pair is None else pair * key
    return (decayed @ probe).permute(0, 1, 4, 2, 3).reshape(batch, key.shape[1], kinds * rows, -1)


def _substitute(coupling: Tensor, target: Tensor, known: Tensor | None) -> Tensor:
    """Solve (I + strictly lower part of coupling) u = target by substitution, given u of the first rows."""
    if coupling.shape[3] == 1:
        return target
    if known is not None:
        first = known.shape[2]
        target, coupling = target - coupling[..., :first] @ known, coupling[..., first:]
    solved: Tensor = torch.linalg.solve_triangular(coupling, target, upper=False, unitriangular=True)
    return solved if known is None else torch.cat((known, solved), 2)


def _remaining(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Sum [b, m, ...] over a whole path and, for each entry, over those after it (None where m is 1)."""
    if log_decay.shape[1] == 1:
        return log_decay[:, 0].to(dtype), None
    sums = log_decay.double().cumsum(1)
    return sums[:, -1].to(dtype), (sums[:, -1:] - sums).to(dtype)


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
    total, later = _remaining(log_decay, state.dtype)
    if later is not None and log_decay.ndim == 3:
        later = later[..., None]
    left = left.neg() if later is None else left * later.exp_().neg_()
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
    dt, key, query = dt.to(dtype), B.to(dtype), C[:, first:].to(dtype)
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
    ssd_fold(state, accepted.take(x), accepted.take(dt), A, accepted.take(B), accepted)


def ssd_fold(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Do the work of `ssd_commit` on rows taken along the path."""
    dt = dt.to(state.dtype)
    log_decay = dt * (A if A.ndim == 1 else A[:, None])
    matrix_commit(state, x * dt[..., None], B.to(state.dtype), log_decay, accepted)


def gated_delta_tree_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    parents: Parents,
    state: Tensor,
    *,
    scale: float | None = None,
    first: int = 0,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule; without `u` the rows below `first` are solved again."""
    start = first if u is not None else 0
    known = None if u is None else u[:, :first]
    topology = Topology.cast(parents)
    o, u = gated_delta_rows(q[:, start:], k, v[:, start:], g, beta[:, start:], topology, state, scale, start, known)
    return o[:, first - start :].contiguous(), u


def gated_delta_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    topology: Topology,
    state: Tensor,
    scale: float | None,
    first: int,
    known: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do the work of `gated_delta_tree_scan` with q, v and beta of the computed rows only."""
    dtype = state.dtype
    o, u = matrix_tree(
        q.to(dtype) * (k.shape[3] ** -0.5 if scale is None else scale),
        k.to(dtype),
        v.to(dtype),
        g,
        state,
        topology,
        beta=beta.to(dtype),
        known=known.to(dtype) if known is not None and first else None,
        first=first,
    )
    return _nodes_first(o, v.dtype), u.transpose(1, 2)


def gated_delta_commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, path: Path, path_lengths: Tensor | None) -> None:
    """Fold the accepted path of a gated delta layer into its state, in place."""
    accepted = AcceptedPath.cast(path, path_lengths)
    shared = u.shape[2] // k.shape[2]
    key = accepted.take(k).to(state.dtype)
    if shared > 1:
        key = key.repeat_interleave(shared, 2)
    matrix_commit(state, key, accepted.take(u).to(state.dtype), accepted.take(g), accepted)


# The diagonal state.


def diagonal_tree(log_decay: Tensor, write: Tensor, state: Tensor, topology: Topology) -> Tensor:
    """Run h_i = e^{g_i} h_parent + x_i along every root path, elementwise.

    Each node holds the map from the state 1, 2, 4, ... edges up to its own; a round composes it with the map of the
    node where it starts.  Products of decays only shrink, so nothing overflows, and no decay between two nodes is
    ever formed: memory is O(n) states and there are log2(n) rounds, whatever the trees.

    Args:
        log_decay: [b, n, ...], at most 0.
        write: [b, n, ...].
        state: [b, ...]; read, never written.
        topology: the trees.

    Returns:
        h as [b, n, ...].
    """
    n = write.shape[1]
    # Row n, above the root, holds the identity.
    nothing = torch.zeros_like(state)[:, None]
    write = torch.cat((write, nothing), 1)
    decay = torch.cat((log_decay, nothing), 1).exp_()
    for start in topology.jump_rows():
        write.addcmul_(decay, take_rows(write, start))
        decay.mul_(take_rows(decay, start))
    return torch.addcmul(write[:, :n], decay[:, :n], state[:, None])


def diagonal_fold(state: Tensor, total: Tensor, later: Tensor | None, write: Tensor, accepted: AcceptedPath) -> None:
    """Fold a path into a diagonal state: h = e^{total} h + sum_j e^{later_j} write_j, in place.

    Args:
        state: [b, ...], written.
        total: [b, ...], log decay over the whole path.
        later: [b, m, ...], log decay over the entries after each, written over; None where m is 1.
        write: [b, m, ...].
        accepted: the path that write was taken by.
    """
    beyond = accepted.beyond.view(*accepted.beyond.shape, *(1,) * (write.ndim - 2))
    write = write.neg() if later is None else write * later.exp_().neg_()
    state.mul_(total.exp()).sub_(write.masked_fill_(beyond, 0).sum(1))


def selective_tree_scan(
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
    """Run the Mamba-1 recurrence: a diagonal state [c, s] with log decay dt A and writes dt x B."""
    return selective_rows(x, dt, A, B, C[:, first:], Topology.cast(parents), state, D, first)


def selective_rows(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    topology: Topology,
    state: Tensor,
    D: Tensor | None,
    first: int,
) -> Tensor:
    """Do the work of `selective_tree_scan` with C of the computed rows only."""
    dtype = state.dtype
    dt = dt.to(dtype)
    write = (dt * x)[..., None] * B.to(dtype)[:, :, None]
    h = diagonal_tree(dt[..., None] * A, write, state, topology)
    y = torch.matmul(h[:, first:], C.to(dtype)[..., None]).squeeze(3)
    if D is not None:
        y = torch.addcmul(y, x[:, first:].to(dtype), D.to(dtype))
    return y.to(x.dtype)


def selective_commit(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, path: Path, path_lengths: Tensor | None
) -> None:
    """Fold the accepted path of a Mamba-1 layer into its state, in place."""
    accepted = AcceptedPath.cast(path, path_lengths)
    dt = accepted.take(dt).to(state.dtype)
    total, later = _remaining(dt, state.dtype)
    if later is not None:
        later = later[..., None] * (A if A.ndim == 2 else A[:, None])
    write = (dt * accepted.take(x))[..., None] * accepted.take(B).to(state.dtype)[:, :, None]
    diagonal_fold(state, total[..., None] * A, later, write, accepted)


def diagonal_tree_scan(log_a: Tensor, x: Tensor, parents: Parents, state: Tensor, *, first: int = 0) -> Tensor:
    """Run the RG-LRU recurrence: a diagonal state [c] with log decay log_a and writes x."""
    dtype = state.dtype
    h = diagonal_tree(log_a.to(dtype), x.to(dtype), state, Topology.cast(parents))
    return h[:, first:].to(x.dtype).contiguous()


def diagonal_commit(state: Tensor, log_a: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None) -> None:
    """Fold the accepted path of an RG-LRU layer into its state, in place."""
    accepted = AcceptedPath.cast(path, path_lengths)
    total, later = _remaining(accepted.take(log_a), state.dtype)
    diagonal_fold(state, total, later, accepted.take(x).to(state.dtype), accepted)


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
    taps = weight.t().to(dtype)
    if n > 1:  # the rows of a single node are the window and itself, already in order
        rows = take_rows(rows, Topology.cast(parents).conv_rows(width)[:, first:].flatten(1))
        taps = taps.contiguous()
    y = (rows.view(batch, n - first, width, channels) * taps).sum(2)
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
        return  # a filter of one tap has no window
    kept = window.gather(2, accepted.conv_from[:, None].expand(-1, channels, -1))
    entered = take_rows(x, accepted.conv_rows, accepted.batch).transpose(1, 2)
    torch.where(accepted.conv_keeps, kept, entered.to(window.dtype), out=window)


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

    Where the caches have r times as many rows as there are lengths, all layers of a kind are committed together.  Rows
    that have no place write back what the cache holds at (lengths + t) mod L, which is a different row for
    every t, so no two writes meet.
    """
    layers = k_cache.shape[0] // max(lengths.shape[0], 1)
    if layers > 1:
        nodes, counts = (path.rows, path.lengths) if isinstance(path, AcceptedPath) else (path, path_lengths)
        assert counts is not None, "a path given as a tensor needs path_lengths"
        path, path_lengths, lengths = nodes.repeat(layers, 1), counts.repeat(layers), lengths.repeat(layers)
    accepted = AcceptedPath.cast(path, path_lengths)
    limit = k_cache.shape[2]
    m = min(accepted.rows.shape[1], limit)
    place = lengths.long()[:, None] + torch.arange(m, device=lengths.device)
    stays = (accepted.beyond[:, :m] | (place >= limit))[:, None, :, None]
    place = place.remainder_(limit)[:, None, :, None]
    source = accepted.rows[:, :m]
    for cache, nodes in ((k_cache, k), (v_cache, v)):
        rows = take_rows(nodes, source, accepted.batch).transpose(1, 2).to(cache.dtype)
        index = place.expand_as(rows)
        cache.scatter_(2, index, torch.where(stays, cache.gather(2, index), rows))
