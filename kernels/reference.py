"""The two recurrences that every operation on token trees is made of, in plain torch: the specification.

A *matrix state*, S_i = decay_i S_parent + k_i u_i^T, carries Mamba-2, gated DeltaNet, KDA and lightning attention
(`matrix_tree`, `matrix_commit`); a *diagonal state*, h_i = a_i h_parent + x_i, carries Mamba-1 and RG-LRU
(`diagonal_tree`, `diagonal_update`).  What a family adds to them is in its folder: `mamba2/reference.py`,
`delta_rule/reference.py`, `diagonal/reference.py`, `conv/reference.py`, `attention/reference.py`.  The Triton kernels
are measured against all of these.  `docs/maths.md` derives the closed forms; `stree.kernels.ops` documents and
checks arguments: references trust their callers.

Accumulation, decays and states are float32, float64 where inputs are float64.  No function reads the device, loops
over nodes, heads or sequences, or has a shape that depends on data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from stree.kernels.topology import AcceptedPath, Topology
from stree.kernels.tree_indices import take_rows

__all__ = [
    "accumulator",
    "diagonal_tree",
    "diagonal_update",
    "matrix_commit",
    "matrix_tree",
    "nodes_first",
    "remaining_decays",
]


def accumulator(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a result for this input is accumulated."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def nodes_first(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn [batch, heads, n, ...] into contiguous [batch, n, heads, ...] of the given dtype."""
    return heads.transpose(1, 2).to(dtype).contiguous()


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
    u_i = beta_i (v_i - e^{g_i} S_parent^T k_i), a unit lower triangular system (docs/maths.md), which is solved by
    substitution, because the product of doublings loses all digits when keys repeat.

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
    heads = sums.transpose(1, 2).contiguous()  # [b, h, n(, s)]: what follows keeps nodes innermost, for the products
    pair = heads[:, :, first:, None] - heads[:, :, None]
    hidden = topology.hidden[:, None, first:]
    pair.masked_fill_(hidden if log_decay.ndim == 3 else hidden[..., None], -torch.inf)
    return sums[:, first:].to(dtype).exp_(), pair.to(dtype).exp_()


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


def matrix_commit(state: Tensor, left: Tensor, right: Tensor, log_decay: Tensor, accepted: AcceptedPath) -> None:
    """Commit a path to a matrix state: S = e^{G_m} S + sum_j (e^{G_m - G_j} left_j) right_j^T, in place.

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
    total, later = remaining_decays(log_decay, state.dtype)
    if later is not None and log_decay.ndim == 3:
        later = later[..., None]
    left = left.neg() if later is None else left * later.exp_().neg_()
    left = left.masked_fill_(accepted.beyond[..., None, None], 0).view(batch, m, groups, -1)
    if isinstance(state, FakeTensor):  # traced: inductor's loop over this sum keeps no product
        update = (left[..., None] * right[..., None, :]).sum(1)
    else:
        update = torch.matmul(left.permute(0, 2, 3, 1), right.transpose(1, 2))  # [b, g, (h / g) i, j]
    state.mul_(total.exp().view(batch, heads, -1, 1)).sub_(update.view(state.shape))


def remaining_decays(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Sum [b, m, ...] over a whole path and, for each entry, over those after it (None where m is 1)."""
    if log_decay.shape[1] == 1:
        return log_decay[:, 0].to(dtype), None
    sums = log_decay.double().cumsum(1)
    return sums[:, -1].to(dtype), (sums[:, -1:] - sums).to(dtype)


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
    for start in topology.jumps:
        write.addcmul_(decay, take_rows(write, start))
        decay.mul_(take_rows(decay, start))
    return torch.addcmul(write[:, :n], decay[:, :n], state[:, None])


def diagonal_update(state: Tensor, total: Tensor, later: Tensor | None, write: Tensor, accepted: AcceptedPath) -> None:
    """Commit a path to a diagonal state: h = e^{total} h + sum_j e^{later_j} write_j, in place.

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
