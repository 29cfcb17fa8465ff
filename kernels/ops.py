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
  the reference).  "triton" never falls back.

Shapes, dtypes and devices are checked always, values (order of parents) only for bare CPU tensors, or everywhere
under STREE_DEBUG=1: on the way through a layer nothing waits for a device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from stree.kernels import reference
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "AcceptedPath",
    "Backend",
    "Parents",
    "Path",
    "Topology",
    "attention_step",
    "conv_commit",
    "conv_step",
    "kv_commit",
    "ssd_commit",
    "ssd_step",
    "ssd_tree_scan",
    "tree_attention",
    "tree_conv1d",
]

Backend = Literal["auto", "reference", "triton"]
Parents = Tensor | Topology
Path = Tensor | AcceptedPath

# Operation -> module that defines a function of the same name and signature (less `backend`) in Triton.
TRITON: dict[str, str] = {}

_DEBUG = os.environ.get("STREE_DEBUG") == "1"
_KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "float32": (torch.float32,),
    "float64": (torch.float64,),
    "float32 or float64": (torch.float32, torch.float64),
    "int32": (torch.int32,),
    "int": (torch.int32, torch.int64),
}


def _choose(op: str, backend: Backend, tensor: Tensor) -> Callable[..., Any]:
    """Return the implementation of an operation for a tensor's device."""
    if backend == "reference" or (backend == "auto" and not (tensor.is_cuda and op in TRITON)):
        return getattr(reference, op)  # type: ignore[no-any-return]
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'triton', got {backend!r}")
    if op not in TRITON:
        raise RuntimeError(f"{op} has no Triton version; those that have one: {', '.join(sorted(TRITON)) or 'none'}")
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{op} with backend='triton' needs CUDA tensors, got a tensor on {tensor.device}")
    return getattr(importlib.import_module(TRITON[op]), op)  # type: ignore[no-any-return]


def _check(name: str, tensor: Tensor, kind: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Require a dtype of `kind`, this shape, and the device of `like`."""
    if tensor.shape == shape and tensor.dtype in _KINDS[kind] and tensor.device == like.device:
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    message = f"{name} must be {kind}{list(shape)} on {like.device}, got {dtype}{list(tensor.shape)} on {tensor.device}"
    raise (TypeError if tensor.shape == shape and tensor.device == like.device else ValueError)(message)


def _check_rank(name: str, tensor: Tensor, axes: str) -> None:
    """Require as many dimensions as `axes` names, separated by spaces."""
    if tensor.ndim != axes.count(" ") + 1:
        raise ValueError(f"{name} must be [{axes.replace(' ', ', ')}], got {list(tensor.shape)}")


def _check_divides(name: str, part: int, whole_name: str, whole: int) -> None:
    """Require that groups split heads evenly."""
    if part < 1 or whole % part:
        raise ValueError(f"{name} must divide {whole_name}, got {part} and {whole}")


def _state_kind(tensor: Tensor) -> str:
    """Name the dtype that a state must have beside inputs like this one."""
    return "float64" if tensor.dtype == torch.float64 else "float32"


def _topology(parents: Parents, batch: int, first: int, like: Tensor) -> Topology:
    """Check parents and derive the topology where a bare tensor is given."""
    if isinstance(parents, Topology):
        tensor = parents.parents
        trusted = not _DEBUG
    else:
        tensor = parents
        trusted = tensor.device.type != "cpu" and not _DEBUG
    if tensor.ndim != 2 or tensor.shape[0] != batch or tensor.dtype != torch.int32 or tensor.device != like.device:
        _check("parents", tensor, "int32", (batch, tensor.shape[-1] if tensor.ndim else 1), like)
    if not 0 <= first < tensor.shape[1]:
        raise ValueError(f"first must be in [0, {tensor.shape[1]}) for {tensor.shape[1]} nodes, got {first}")
    if not trusted:
        _check_order(tensor)
    return Topology.cast(parents)


def _check_order(parents: Tensor) -> None:
    """Require topological order and childless padding; reads the values."""
    index = torch.arange(parents.shape[1], device=parents.device)
    if bool((parents[:, 0] != -1).any()):
        raise ValueError(f"parents[:, 0] must be -1, got {parents[:, 0].tolist()}")
    wrong = (parents < -1) | (parents >= index)
    if bool(wrong.any()):
        row, node = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"parents[{row}, {node}] must be in [-1, {node}), got {int(parents[row, node])}")
    padding = (parents == -1) & (index > 0)
    orphans = padding.gather(1, parents.clamp(min=0).long()) & (parents > 0)
    if bool(orphans.any()):
        row, node = (int(i) for i in orphans.nonzero()[0])
        raise ValueError(
            f"parents[{row}, {node}] is {int(parents[row, node])}, a padding node; padding has no children"
        )


def _accepted(
    path: Path, path_lengths: Tensor | None, batch: int, like: Tensor, width: int | None = None
) -> AcceptedPath:
    """Check a path and derive its indices where bare tensors are given."""
    if isinstance(path, AcceptedPath):
        if path_lengths is not None:
            raise ValueError("path_lengths must be None when path is an AcceptedPath, which holds them")
        _check("path", path.rows, "int", (batch, path.rows.shape[1]), like)
        return AcceptedPath.cast(path, None, width)
    if path_lengths is None:
        raise ValueError(f"path_lengths must be int32[{batch}], got None")
    _check("path", path, "int32", (batch, path.shape[-1] if path.ndim else 1), like)
    _check("path_lengths", path_lengths, "int32", (batch,), like)
    return AcceptedPath.of(path, path_lengths, width)


def _check_nodes(name: str, n: int, topology: Topology) -> None:
    """Require as many rows as the trees have nodes."""
    if topology.parents.shape[1] != n:
        batch = topology.parents.shape[0]
        raise ValueError(f"parents must be int32[{batch}, {n}] for {n} rows of {name}, got {[*topology.parents.shape]}")


def _check_room(room: int, topology: Topology) -> None:
    """Require a stash that can hold the trees."""
    if topology.parents.shape[1] > room:
        raise ValueError(f"the stash has room for {room} nodes, got a tree of {topology.parents.shape[1]}")


def _check_conv(
    window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, sizes: tuple[int, int], like: Tensor
) -> None:
    """Require the operands of a convolution that fit a batch and its channels."""
    batch, channels = sizes
    _check_rank("weight", weight, "c w")
    _check("weight", weight, "float", (channels, weight.shape[1]), like)
    _check("window", window, "float", (batch, channels, weight.shape[1] - 1), like)
    if bias is not None:
        _check("bias", bias, "float", (channels,), like)
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")


def _check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, rows: int) -> None:
    """Require caches, lengths and queries that agree."""
    batch, _, heads, dim = q.shape
    _check_rank("k_cache", k_cache, "b hk L d")
    _check_rank("v_cache", v_cache, "b hk L dv")
    kv_heads, context = k_cache.shape[1:3]
    _check_divides("heads of k_cache", kv_heads, "heads of q", heads)
    _check("q", q, "float", (batch, rows, heads, dim), q)
    _check("k_cache", k_cache, "float", (batch, kv_heads, context, dim), q)
    _check("v_cache", v_cache, "float", (batch, kv_heads, context, v_cache.shape[3]), q)
    _check("lengths", lengths, "int32", (batch,), q)


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
    _check_rank("x", x, "b n h p")
    _check_rank("B", B, "b n g s")
    batch, n, heads, headdim = x.shape
    groups, dstate = B.shape[2:]
    _check_divides("groups of B", groups, "heads of x", heads)
    _check("dt", dt, "float", (batch, n, heads), x)
    _check("A", A, "float", (heads,), x)
    _check("B", B, "float", (batch, n, groups, dstate), x)
    _check("C", C, "float", (batch, n, groups, dstate), x)
    _check("state", state, _state_kind(x), (batch, heads, headdim, dstate), x)
    if D is not None:
        _check("D", D, "float", (heads,), x)
    topology = _topology(parents, batch, first, x)
    _check_nodes("x", n, topology)
    scan = _choose("ssd_tree_scan", backend, x)
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
    _check_rank("state", state, "b h p s")
    _check_rank("B", B, "b n g s")
    batch, heads, headdim, dstate = state.shape
    n, groups = B.shape[1:3]
    _check_divides("groups of B", groups, "heads of state", heads)
    _check("state", state, _state_kind(x), (batch, heads, headdim, dstate), state)
    _check("x", x, "float", (batch, n, heads, headdim), state)
    _check("dt", dt, "float", (batch, n, heads), state)
    _check("A", A, "float", (heads,) if A.ndim == 1 else (batch, heads), state)
    _check("B", B, "float", (batch, n, groups, dstate), state)
    accepted = _accepted(path, path_lengths, batch, state)
    _choose("ssd_commit", backend, state)(state, x, dt, A, B, accepted, None)


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
        backend: see the module.

    Returns:
        float[b, n - first, h, p], dtype of stash_xbc, contiguous.
    """
    _check_rank("state", state, "b h p s")
    batch, heads, _, dstate = state.shape
    topology = _topology(parents, batch, first, state)
    rows, room = topology.parents.shape[1] - first, stash_xbc.shape[1]
    width = heads * headdim + 2 * ngroups * dstate
    _check_divides("ngroups", ngroups, "heads of state", heads)
    _check("state", state, _state_kind(xbc), (batch, heads, headdim, dstate), state)
    _check("stash_xbc", stash_xbc, "float", (batch, room, width), state)
    _check("stash_dt", stash_dt, _state_kind(xbc), (batch, room, heads), state)
    _check("xbc", xbc, "float", (batch, rows, width), state)
    _check("dt", dt, "float", (batch, rows, heads), state)
    _check("A", A, "float", (heads,), state)
    _check_room(room, topology)
    accepted = None if path is None else _accepted(path, path_lengths, batch, state)
    step = _choose("ssd_step", backend, state)
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
    )
    return out


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
    _check_rank("x", x, "b n c")
    batch, n, channels = x.shape
    _check_conv(window, weight, bias, activation, (batch, channels), x)
    topology = _topology(parents, batch, first, x)
    _check_nodes("x", n, topology)
    convolve = _choose("tree_conv1d", backend, x)
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
    _check_rank("window", window, "b c w-1")
    _check_rank("x", x, "b n c")
    batch, channels, history = window.shape
    _check("x", x, "float", (batch, x.shape[1], channels), window)
    accepted = _accepted(path, path_lengths, batch, window, history + 1)
    _choose("conv_commit", backend, window)(window, x, accepted, None)


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
        backend: see the module.

    Returns:
        float[b, n - first, c], dtype of stash.
    """
    _check_rank("stash", stash, "b N c")
    batch, room, channels = stash.shape
    _check_conv(window, weight, bias, activation, (batch, channels), stash)
    topology = _topology(parents, batch, first, stash)
    _check("x", x, "float", (batch, topology.parents.shape[1] - first, channels), stash)
    _check_room(room, topology)
    accepted = None if path is None else _accepted(path, path_lengths, batch, stash, weight.shape[1])
    step = _choose("conv_step", backend, stash)
    out: Tensor = step(window, stash, accepted, None, x, weight, bias, topology, activation=activation, first=first)
    return out


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
    _check_rank("q", q, "b n-first hq d")
    batch = q.shape[0]
    topology = _topology(parents, batch, first, q)
    n = topology.parents.shape[1]
    _check_attention(q, k_cache, v_cache, lengths, n - first)
    kv_heads = k_cache.shape[1]
    _check("k", k, "float", (batch, n, kv_heads, q.shape[3]), q)
    _check("v", v, "float", (batch, n, kv_heads, v_cache.shape[3]), q)
    attend = _choose("tree_attention", backend, q)
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
        k_cache: float[b, hk, L, d], written.
        v_cache: float[b, hk, L, dv], written.
        lengths: int32[b], rows in use before the commit.
        k: float[b, n, hk, d].
        v: float[b, n, hk, dv].
        path: accepted nodes.
        path_lengths: their number, root included.
        backend: see the module.
    """
    _check_rank("k_cache", k_cache, "b hk L d")
    _check_rank("v_cache", v_cache, "b hk L dv")
    _check_rank("k", k, "b n hk d")
    batch, kv_heads, context, dim = k_cache.shape
    _check("v_cache", v_cache, "float", (batch, kv_heads, context, v_cache.shape[3]), k_cache)
    _check("lengths", lengths, "int32", (batch,), k_cache)
    _check("k", k, "float", (batch, k.shape[1], kv_heads, dim), k_cache)
    _check("v", v, "float", (batch, k.shape[1], kv_heads, v_cache.shape[3]), k_cache)
    accepted = _accepted(path, path_lengths, batch, k_cache)
    _choose("kv_commit", backend, k_cache)(k_cache, v_cache, lengths, k, v, accepted, None)


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
        backend: see the module.

    Returns:
        float[b, n - first, hq, dv], dtype of q, contiguous.
    """
    _check_rank("q", q, "b n-first hq d")
    batch = q.shape[0]
    topology = _topology(parents, batch, first, q)
    rows, room = topology.parents.shape[1] - first, stash_k.shape[1]
    _check_attention(q, k_cache, v_cache, lengths, rows)
    kv_heads, dim, value_dim = k_cache.shape[1], q.shape[3], v_cache.shape[3]
    _check("stash_k", stash_k, "float", (batch, room, kv_heads, dim), q)
    _check("stash_v", stash_v, "float", (batch, room, kv_heads, value_dim), q)
    _check("k", k, "float", (batch, rows, kv_heads, dim), q)
    _check("v", v, "float", (batch, rows, kv_heads, value_dim), q)
    _check_room(room, topology)
    accepted = None if path is None else _accepted(path, path_lengths, batch, q)
    step = _choose("attention_step", backend, q)
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
