"""The front door to every operation on token trees: documents arguments, checks them, chooses the implementation.

Shapes are written dtype[axes]: b batch, n nodes, h heads, g groups, p headdim, s dstate, c channels, w filter width,
m entries of a path, N nodes that a stash has room for.  `float` is any floating dtype; outputs have the dtype of x, q
or v; accumulation, decays and states are float32 (float64 where the inputs are float64).

Common to all operations:

- `parents` is int32[b, n] or, better, a `Topology` made once a step.  parents[:, 0] == -1, parents[:, i] < i; a -1 at
  i > 0 marks padding, whose outputs are finite but mean nothing.
- `first=k`: only rows k.. are computed and returned; inputs still hold all n nodes unless said otherwise.
- `path` is int32[b, m], nodes from the root down, or an `AcceptedPath` made once a step (then `path_lengths` is None).
  Entries past a length are ignored; length 0 leaves that sequence bit for bit as it was.
- Scans read states and never write them; commits write in place and treat the batch as so many independent rows, so
  the layers of a model may be stacked into it.
- A `*_step` is exactly: commit of `path` from the stash (skipped when `path` is None), copy of the new rows
  first..n - 1 into the stash, scan of stash rows 0..n - 1.
- `backend`: "reference", "triton" or "auto" (Triton for CUDA tensors where that operation has a Triton version, else
  the reference).  "triton" never falls back; it takes tensors of which at least the last dimension is contiguous, of
  states, windows and matrices the last ones, and names one that is not.

Shapes, dtypes and devices are checked always, values (order of parents) only for bare CPU tensors, or everywhere
under STREE_DEBUG=1: on the way through a layer nothing waits for a device.
"""

from __future__ import annotations

from torch import Tensor

from stree.kernels.checks import (
    TRITON,
    Backend,
    Parents,
    Path,
    check,
    check_attention,
    check_conv,
    check_divides,
    check_nodes,
    check_path,
    check_rank,
    choose,
    state_kind,
    take_path,
    take_topology,
)
from stree.kernels.norm_ops import gated_rms_norm, rms_norm, rms_norm_add
from stree.kernels.pointwise_ops import delta_inputs, experts, gated_activation, rotary
from stree.kernels.steps import (
    attention_step,
    conv_step,
    diagonal_step,
    gated_delta_step,
    selective_step,
    ssd_step,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "TRITON",
    "AcceptedPath",
    "Backend",
    "Parents",
    "Path",
    "Topology",
    "attention_step",
    "conv_commit",
    "conv_step",
    "delta_inputs",
    "diagonal_commit",
    "diagonal_step",
    "diagonal_tree_scan",
    "experts",
    "gated_activation",
    "gated_delta_commit",
    "gated_delta_step",
    "gated_delta_tree_scan",
    "gated_rms_norm",
    "kv_commit",
    "rms_norm",
    "rms_norm_add",
    "rotary",
    "selective_commit",
    "selective_step",
    "selective_tree_scan",
    "ssd_commit",
    "ssd_step",
    "ssd_tree_scan",
    "tree_attention",
    "tree_conv1d",
]


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
    backend: Backend = "auto",
) -> Tensor:
    """Run the Mamba-2 recurrence along every root-to-node path of a token tree.

    Node i continues its parent, not node i - 1 (Mamba-2, arXiv 2405.21060; on trees STree, arXiv 2505.14969):

        S[i] = exp(dt[i] * A) * S[parent of i] + dt[i] * x[i] B[i]^T        S[-1] = state
        y[i] = S[i] C[i] + D * x[i]

    A chain, parents = [-1, 0, 1, ...], gives the ordinary sequential scan.

    Args:
        x: float[b, n, h, p], inputs after the convolution.
        dt: float[b, n, h], step sizes after bias, softplus and limit; positive, finite.
        A: float[h], negative.
        B: float[b, n, g, s]; g divides h.
        C: float[b, n, g, s].
        parents: the trees.
        state: float32[b, h, p, s], state before the root; read, never written.
        D: float[h], or None for no skip term.
        first: first row to compute.
        backend: see the module.

    Returns:
        float[b, n - first, h, p], dtype of x, contiguous.

    Raises:
        ValueError: a shape, device or parent disagrees.
        TypeError: a dtype disagrees.
        RuntimeError: backend="triton" where it cannot run.
    """
    check_rank("x", x, "b n h p")
    check_rank("B", B, "b n g s")
    batch, n, heads, headdim = x.shape
    groups, dstate = B.shape[2:]
    check_divides("groups of B", groups, "heads of x", heads)
    check("dt", dt, "float", (batch, n, heads), x)
    check("A", A, "float", (heads,), x)
    check("B", B, "float", (batch, n, groups, dstate), x)
    check("C", C, "float", (batch, n, groups, dstate), x)
    check("state", state, state_kind(x), (batch, heads, headdim, dstate), x)
    if D is not None:
        check("D", D, "float", (heads,), x)
    topology = take_topology(parents, batch, first, x)
    check_nodes("x", n, topology)
    scan = choose("ssd_tree_scan", backend, x)
    out: Tensor = scan(x, dt, A, B, C, topology, state, D=D, first=first)
    return out


def ssd_commit(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    path: Path,
    path_lengths: Tensor | None,
    *,
    backend: Backend = "auto",
) -> None:
    """Fold the accepted path of a Mamba-2 layer into its state, in place, in closed form.

    Args:
        state: float32[b, h, p, s], written.
        x: float[b, n, h, p].
        dt: float[b, n, h].
        A: float[h], or float[b, h] where the batch stacks layers.
        B: float[b, n, g, s].
        path: accepted nodes.
        path_lengths: their number, root included.
        backend: see the module.
    """
    check_rank("state", state, "b h p s")
    check_rank("B", B, "b n g s")
    batch, heads, headdim, dstate = state.shape
    n, groups = B.shape[1:3]
    check_divides("groups of B", groups, "heads of state", heads)
    check("state", state, state_kind(x), (batch, heads, headdim, dstate), state)
    check("x", x, "float", (batch, n, heads, headdim), state)
    check("dt", dt, "float", (batch, n, heads), state)
    check("A", A, "float", (heads,) if A.ndim == 1 else (batch, heads), state)
    check("B", B, "float", (batch, n, groups, dstate), state)
    accepted = take_path(path, path_lengths, batch, state)
    choose("ssd_commit", backend, state)(state, x, dt, A, B, accepted, None)


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
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule (gated DeltaNet, KDA) along every root-to-node path of a token tree.

    Every node erases what its key reads, then writes (gated DeltaNet, arXiv 2412.06464; KDA, arXiv 2510.26692):

        u[i] = beta[i] * (v[i] - S'^T k[i])      S' = exp(g[i]) * S[parent of i],  S[-1] = state
        S[i] = S' + k[i] u[i]^T                  o[i] = scale * S[i]^T q[i]

    Args:
        q: float[b, n, hk, dk], normalised.
        k: float[b, n, hk, dk], normalised; hk divides hv.
        v: float[b, n, hv, dv].
        g: float[b, n, hv] log decays, at most 0 and finite; float[b, n, hv, dk] for one per key channel.
        beta: float[b, n, hv], in [0, 2].
        parents: the trees.
        state: float32[b, hv, dk, dv], state before the root; read, never written.
        scale: factor on the outputs; dk ** -0.5 if None.
        first: first row to compute.
        u: float[b, at least first, hv, dv], u of the rows below `first` from earlier calls; rows from `first` on are
            ignored.  None: those rows are solved again.
        backend: see the module.

    Returns:
        o: float[b, n - first, hv, dv], dtype of v; and u: float32[b, n, hv, dv], what a commit needs.
    """
    check_rank("k", k, "b n hk dk")
    check_rank("v", v, "b n hv dv")
    batch, n, key_heads, dk = k.shape
    heads, dv = v.shape[2:]
    check_divides("heads of k", key_heads, "heads of v", heads)
    check("q", q, "float", (batch, n, key_heads, dk), k)
    check("v", v, "float", (batch, n, heads, dv), k)
    check("g", g, "float", (batch, n, heads, dk) if g.ndim == 4 else (batch, n, heads), k)
    check("beta", beta, "float", (batch, n, heads), k)
    check("state", state, state_kind(v), (batch, heads, dk, dv), k)
    topology = take_topology(parents, batch, first, k)
    check_nodes("k", n, topology)
    if u is not None:
        check("u", u, "float", (batch, max(u.shape[1], first), heads, dv), k)
    scan = choose("gated_delta_tree_scan", backend, k)
    out: tuple[Tensor, Tensor] = scan(q, k, v, g, beta, topology, state, scale=scale, first=first, u=u)
    return out


def gated_delta_commit(
    state: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor,
    path: Path,
    path_lengths: Tensor | None,
    *,
    backend: Backend = "auto",
) -> None:
    """Fold the accepted path of a gated delta layer into its state, in place, in closed form.

    Args:
        state: float32[b, hv, dk, dv], written.
        k: float[b, n, hk, dk].
        u: float[b, n, hv, dv], as the scan returned it.
        g: float[b, n, hv] or float[b, n, hv, dk].
        path: accepted nodes.
        path_lengths: their number, root included.
        backend: see the module.
    """
    check_rank("state", state, "b hv dk dv")
    check_rank("k", k, "b n hk dk")
    batch, heads, dk, dv = state.shape
    n, key_heads = k.shape[1:3]
    check_divides("heads of k", key_heads, "heads of state", heads)
    check("state", state, state_kind(k), (batch, heads, dk, dv), state)
    check("k", k, "float", (batch, n, key_heads, dk), state)
    check("u", u, "float", (batch, n, heads, dv), state)
    check("g", g, "float", (batch, n, heads, dk) if g.ndim == 4 else (batch, n, heads), state)
    accepted = take_path(path, path_lengths, batch, state)
    choose("gated_delta_commit", backend, state)(state, k, u, g, accepted, None)


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
    backend: Backend = "auto",
) -> Tensor:
    """Run the Mamba-1 recurrence along every root-to-node path of a token tree.

    The state is diagonal, with a decay for every channel and state (Mamba, arXiv 2312.00752):

        h[i] = exp(dt[i] * A) * h[parent of i] + dt[i] * x[i] * B[i]        h[-1] = state
        y[i] = h[i] C[i] + D * x[i]

    Every ancestor is needed to compute a row, so `first` saves only the reading of the states.

    Args:
        x: float[b, n, c], inputs after the convolution.
        dt: float[b, n, c], step sizes after bias and softplus; positive, finite.
        A: float[c, s], negative.
        B: float[b, n, s].
        C: float[b, n, s].
        parents: the trees.
        state: float32[b, c, s], state before the root; read, never written.
        D: float[c], or None for no skip term.
        first: first row to return.
        backend: see the module.

    Returns:
        float[b, n - first, c], dtype of x.
    """
    check_rank("x", x, "b n c")
    check_rank("A", A, "c s")
    batch, n, channels = x.shape
    dstate = A.shape[1]
    check("dt", dt, "float", (batch, n, channels), x)
    check("A", A, "float", (channels, dstate), x)
    check("B", B, "float", (batch, n, dstate), x)
    check("C", C, "float", (batch, n, dstate), x)
    check("state", state, state_kind(x), (batch, channels, dstate), x)
    if D is not None:
        check("D", D, "float", (channels,), x)
    topology = take_topology(parents, batch, first, x)
    check_nodes("x", n, topology)
    scan = choose("selective_tree_scan", backend, x)
    out: Tensor = scan(x, dt, A, B, C, topology, state, D=D, first=first)
    return out


def selective_commit(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    path: Path,
    path_lengths: Tensor | None,
    *,
    backend: Backend = "auto",
) -> None:
    """Fold the accepted path of a Mamba-1 layer into its state, in place, in closed form.

    Args:
        state: float32[b, c, s], written.
        x: float[b, n, c].
        dt: float[b, n, c].
        A: float[c, s], or float[b, c, s] where the batch stacks layers.
        B: float[b, n, s].
        path: accepted nodes.
        path_lengths: their number, root included.
        backend: see the module.
    """
    check_rank("state", state, "b c s")
    check_rank("x", x, "b n c")
    batch, channels, dstate = state.shape
    n = x.shape[1]
    check("state", state, state_kind(x), (batch, channels, dstate), state)
    check("x", x, "float", (batch, n, channels), state)
    check("dt", dt, "float", (batch, n, channels), state)
    check("A", A, "float", (channels, dstate) if A.ndim == 2 else (batch, channels, dstate), state)
    check("B", B, "float", (batch, n, dstate), state)
    accepted = take_path(path, path_lengths, batch, state)
    choose("selective_commit", backend, state)(state, x, dt, A, B, accepted, None)


def diagonal_tree_scan(
    log_a: Tensor, x: Tensor, parents: Parents, state: Tensor, *, first: int = 0, backend: Backend = "auto"
) -> Tensor:
    """Run a diagonal recurrence (RG-LRU, Griffin, arXiv 2402.19427) along every root-to-node path of a token tree.

        h[i] = exp(log_a[i]) * h[parent of i] + x[i]        h[-1] = state

    Every ancestor is needed to compute a row, so `first` saves nothing here.

    Args:
        log_a: float[b, n, c], at most 0 and finite.
        x: float[b, n, c], gated and normalised inputs.
        parents: the trees.
        state: float32[b, c], state before the root; read, never written.
        first: first row to return.
        backend: see the module.

    Returns:
        float[b, n - first, c], dtype of x, contiguous.
    """
    check_rank("x", x, "b n c")
    batch, n, channels = x.shape
    check("log_a", log_a, "float", (batch, n, channels), x)
    check("state", state, state_kind(x), (batch, channels), x)
    topology = take_topology(parents, batch, first, x)
    check_nodes("x", n, topology)
    scan = choose("diagonal_tree_scan", backend, x)
    out: Tensor = scan(log_a, x, topology, state, first=first)
    return out


def diagonal_commit(
    state: Tensor,
    log_a: Tensor,
    x: Tensor,
    path: Path,
    path_lengths: Tensor | None,
    *,
    backend: Backend = "auto",
) -> None:
    """Fold the accepted path of a diagonal recurrence into its state, in place, in closed form.

    Args:
        state: float32[b, c], written.
        log_a: float[b, n, c].
        x: float[b, n, c].
        path: accepted nodes.
        path_lengths: their number, root included.
        backend: see the module.
    """
    check_rank("state", state, "b c")
    check_rank("x", x, "b n c")
    batch, channels = state.shape
    check("state", state, state_kind(x), (batch, channels), state)
    check("x", x, "float", (batch, x.shape[1], channels), state)
    check("log_a", log_a, "float", (batch, x.shape[1], channels), state)
    accepted = take_path(path, path_lengths, batch, state)
    choose("diagonal_commit", backend, state)(state, log_a, x, accepted, None)


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Parents,
    window: Tensor,
    *,
    activation: str | None = "silu",
    first: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Apply a causal depthwise convolution along every root-to-node path.

    Node i reads itself, its last w - 1 ancestors and, above the root, the stored window, newest column last.

    Args:
        x: float[b, n, c], inputs before the convolution.
        weight: float[c, w], last tap on the node itself.
        bias: float[c] or None.
        parents: the trees.
        window: float[b, c, w - 1], inputs before the root; read, never written.
        activation: "silu" or None.
        first: first row to compute.
        backend: see the module.

    Returns:
        float[b, n - first, c], dtype of x.
    """
    check_rank("x", x, "b n c")
    batch, n, channels = x.shape
    check_conv(window, weight, bias, activation, (batch, channels), x)
    topology = take_topology(parents, batch, first, x)
    check_nodes("x", n, topology)
    convolve = choose("tree_conv1d", backend, x)
    out: Tensor = convolve(x, weight, bias, topology, window, activation=activation, first=first)
    return out


def conv_commit(
    window: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None, *, backend: Backend = "auto"
) -> None:
    """Move the accepted rows into the window of a convolution, in place.

    Args:
        window: float[b, c, w - 1], written.
        x: float[b, n, c], inputs before the convolution.
        path: accepted nodes.
        path_lengths: their number, root included.
        backend: see the module.
    """
    check_rank("window", window, "b c w-1")
    check_rank("x", x, "b n c")
    batch, channels, history = window.shape
    check("x", x, "float", (batch, x.shape[1], channels), window)
    accepted = take_path(path, path_lengths, batch, window, history + 1)
    choose("conv_commit", backend, window)(window, x, accepted, None)


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
    backend: Backend = "auto",
) -> Tensor:
    """Attend from every node to the cached context and to its own ancestors, itself included.

    Node i stands at position lengths + depth of i.  Rotary or other positions are the caller's, already in q, k and
    the cache.  Cache rows from lengths on are not attended to but must be finite (caches start as zeros).

    Args:
        q: float[b, n - first, hq, d].
        k_cache: float[b, hk, L, d]; hk divides hq.  Pass a view narrowed to the rows in use.
        v_cache: float[b, hk, L, dv].
        lengths: int32[b], rows of the cache in use.
        k: float[b, n, hk, d].
        v: float[b, n, hk, dv].
        parents: the trees.
        scale: factor on the scores, d ** -0.5 as a rule.
        window: a node attends to positions above its own minus window; None for all.
        softcap: scores become softcap * tanh(scores / softcap); None for as they are.
        first: first row to compute.
        backend: see the module.

    Returns:
        float[b, n - first, hq, dv], dtype of q, contiguous; softmax in float32.
    """
    check_rank("q", q, "b n-first hq d")
    batch = q.shape[0]
    topology = take_topology(parents, batch, first, q)
    n = topology.parents.shape[1]
    check_attention(q, k_cache, v_cache, lengths, n - first)
    kv_heads = k_cache.shape[1]
    check("k", k, "float", (batch, n, kv_heads, q.shape[3]), q)
    check("v", v, "float", (batch, n, kv_heads, v_cache.shape[3]), q)
    attend = choose("tree_attention", backend, q)
    out: Tensor = attend(
        q, k_cache, v_cache, lengths, k, v, topology, scale=scale, window=window, softcap=softcap, first=first
    )
    return out


def kv_commit(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    path: Path,
    path_lengths: Tensor | None,
    *,
    backend: Backend = "auto",
) -> None:
    """Append the accepted rows of K and V to the caches at `lengths`, in place; `lengths` itself is not advanced.

    Nothing is written past the end of a cache, nor for an empty path.

    Args:
        k_cache: float[r b, hk, L, d], written: b sequences of r layers, layer after layer.
        v_cache: float[r b, hk, L, dv], written.
        lengths: int32[b], rows in use before the commit.
        k: float[r b, n, hk, d].
        v: float[r b, n, hk, dv].
        path: accepted nodes, of b sequences.
        path_lengths: their number, root included.
        backend: see the module.
    """
    check_rank("k_cache", k_cache, "b hk L d")
    check_rank("v_cache", v_cache, "b hk L dv")
    check_rank("k", k, "b n hk d")
    batch, kv_heads, context, dim = k_cache.shape
    check("v_cache", v_cache, "float", (batch, kv_heads, context, v_cache.shape[3]), k_cache)
    check_rank("lengths", lengths, "b")
    sequences = lengths.shape[0]
    check_divides("rows of lengths", sequences, "rows of k_cache", batch)
    check("lengths", lengths, "int32", (sequences,), k_cache)
    check("k", k, "float", (batch, k.shape[1], kv_heads, dim), k_cache)
    check("v", v, "float", (batch, k.shape[1], kv_heads, v_cache.shape[3]), k_cache)
    check_path(path, path_lengths, sequences, k_cache)
    choose("kv_commit", backend, k_cache)(k_cache, v_cache, lengths, k, v, path, path_lengths)
