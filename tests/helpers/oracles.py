"""Every operation as explicit float64 loops over nodes with a full state for each: the tests' independent oracle.

Slow on purpose, and shares no line with `stree.kernels.reference`.  Functions take one sequence (no batch axis),
tensors of any dtype and a list of parents, and return float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """List the nodes from the root down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, parents: Sequence[int], state: Tensor, D: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Mamba-2: outputs [n, h, p] and the state [h, p, s] after every node."""
    x, dt, A, B, C, state = (t.double() for t in (x, dt, A, B, C, state))
    nheads, ngroups = x.shape[1], B.shape[1]
    states: list[Tensor] = []
    y = torch.zeros_like(x)
    for i, parent in enumerate(parents):
        before = state if parent < 0 else states[parent]
        after = torch.zeros_like(state)
        for head in range(nheads):
            group = head * ngroups // nheads
            decay = math.exp(float(dt[i, head] * A[head]))
            after[head] = decay * before[head] + dt[i, head] * torch.outer(x[i, head], B[i, group])
            y[i, head] = after[head] @ C[i, group]
            if D is not None:
                y[i, head] += D[head].double() * x[i, head]
        states.append(after)
    return y, states


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parents: Sequence[int], state: Tensor, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Gated DeltaNet and KDA: outputs [n, hv, dv] and the state [hv, dk, dv] after every node."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    value_heads, key_heads = v.shape[1], k.shape[1]
    states: list[Tensor] = []
    out = torch.zeros_like(v)
    for i, parent in enumerate(parents):
        before = state if parent < 0 else states[parent]
        after = torch.zeros_like(state)
        for head in range(value_heads):
            shared = head * key_heads // value_heads
            decayed = torch.exp(g[i, head]).reshape(-1, 1) * before[head]
            error = v[i, head] - k[i, shared] @ decayed
            after[head] = decayed + beta[i, head] * torch.outer(k[i, shared], error)
            out[i, head] = scale * (q[i, shared] @ after[head])
        states.append(after)
    return out, states


def selective(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, parents: Sequence[int], state: Tensor, D: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Mamba-1: outputs [n, c] and the state [c, s] after every node."""
    x, dt, A, B, C, state = (t.double() for t in (x, dt, A, B, C, state))
    states: list[Tensor] = []
    y = torch.zeros_like(x)
    for i, parent in enumerate(parents):
        before = state if parent < 0 else states[parent]
        after = torch.zeros_like(state)
        for channel in range(x.shape[1]):
            after[channel] = torch.exp(dt[i, channel] * A[channel]) * before[channel]
            after[channel] += dt[i, channel] * x[i, channel] * B[i]
            y[i, channel] = after[channel] @ C[i]
            if D is not None:
                y[i, channel] += D[channel].double() * x[i, channel]
        states.append(after)
    return y, states


def diagonal(log_a: Tensor, x: Tensor, parents: Sequence[int], state: Tensor) -> list[Tensor]:
    """RG-LRU after its gates: the state [c] after every node."""
    states: list[Tensor] = []
    for i, parent in enumerate(parents):
        before = state.double() if parent < 0 else states[parent]
        states.append(torch.exp(log_a[i].double()) * before + x[i].double())
    return states


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, parents: Sequence[int], window: Tensor, silu: bool
) -> tuple[Tensor, list[Tensor]]:
    """Short convolution: outputs [n, c] and the window [c, w - 1] after every node."""
    width = weight.shape[1]
    y, windows = torch.zeros_like(x, dtype=torch.float64), []
    for i in range(len(parents)):
        history = [window[:, t].double() for t in range(width - 1)] + [x[j].double() for j in path_to(parents, i)]
        total = torch.zeros_like(y[i])
        for tap in range(width):
            total += weight[:, tap].double() * history[len(history) - width + tap]
        if bias is not None:
            total += bias.double()
        y[i] = total / (1 + torch.exp(-total)) if silu else total
        kept = history[len(history) - (width - 1) :]
        windows.append(torch.stack(kept, 1) if kept else window.double())
    return y, windows


def attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over [context, path]: outputs [n, hq, dv]; contexts are [hk, length, d]."""
    query_heads, kv_heads = q.shape[1], k.shape[1]
    out = torch.zeros(len(parents), query_heads, v.shape[2], dtype=torch.float64)
    for i in range(len(parents)):
        path = path_to(parents, i)
        for head in range(query_heads):
            shared = head * kv_heads // query_heads
            keys = torch.cat([context_k[shared].double(), torch.stack([k[j, shared].double() for j in path])])
            values = torch.cat([context_v[shared].double(), torch.stack([v[j, shared].double() for j in path])])
            if window is not None:
                keys, values = keys[-window:], values[-window:]
            scores = scale * (keys @ q[i, head].double())
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.max())
            out[i, head] = (weights / weights.sum()) @ values
    return out


def random_parents(batch: int, n: int, rng: torch.Generator, padding: int = 0) -> Tensor:
    """Draw a different tree for every sequence, int32[batch, n]; the last `padding` nodes of each are padding."""
    rows = []
    for _ in range(batch):
        reach = int(torch.randint(1, n + 1, (), generator=rng))  # small reach: deep trees; large: bushy ones
        row = [-1]
        for i in range(1, n):
            row.append(-1 if i >= n - padding else int(torch.randint(max(0, i - reach), i, (), generator=rng)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int32)


def paths_to(parents: Tensor, nodes: Sequence[int | None], extra: int = 1) -> tuple[Tensor, Tensor]:
    """Make path int32[batch, m] and path_lengths down to a node of each tree; None: an empty path.

    Entries past a length hold nonsense, as they may.
    """
    paths = [[] if node is None else path_to(row, node) for row, node in zip(parents.tolist(), nodes, strict=True)]
    width = max(map(len, paths)) + extra
    rows = [path + [10**6, -1, -(10**6)][: width - len(path)] + [-1] * (width - len(path) - 3) for path in paths]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor([len(path) for path in paths], dtype=torch.int32)
