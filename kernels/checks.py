"""Checks of the front door: shapes, dtypes and devices always, values only where reading them waits for nothing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from stree.kernels import reference, reference_accept, reference_norm, reference_pointwise, reference_steps
from stree.kernels.topology import AcceptedPath, Topology, reads_freely

Backend = Literal["auto", "reference", "triton"]
Parents = Tensor | Topology
Path = Tensor | AcceptedPath

# Operation -> module that defines a function of the same name and signature (less `backend`) in Triton.
TRITON: dict[str, str] = {
    **dict.fromkeys(("ssd_tree_scan", "ssd_commit", "ssd_step"), "stree.kernels.ssd"),
    **dict.fromkeys(
        (
            "selective_tree_scan",
            "selective_commit",
            "selective_step",
            "diagonal_tree_scan",
            "diagonal_commit",
            "diagonal_step",
        ),
        "stree.kernels.diagonal",
    ),
    **dict.fromkeys(("gated_delta_tree_scan", "gated_delta_commit", "gated_delta_step"), "stree.kernels.gated_delta"),
    **dict.fromkeys(("gated_rms_norm", "rms_norm", "rms_norm_add"), "stree.kernels.norm"),
    **dict.fromkeys(("delta_inputs", "gated_activation", "rotary"), "stree.kernels.pointwise"),
    "experts": "stree.kernels.experts",
    **dict.fromkeys(("tree_conv1d", "conv_commit", "conv_step"), "stree.kernels.conv"),
    **dict.fromkeys(("tree_attention", "attention_step", "kv_commit"), "stree.kernels.attention"),
    **dict.fromkeys(("philox_uniform", "choice", "draw_distinct", "match_accept"), "stree.kernels.accept"),
}

DEBUG = os.environ.get("STREE_DEBUG") == "1"
_KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "float32": (torch.float32,),
    "float64": (torch.float64,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
}


def choose(op: str, backend: Backend, tensor: Tensor) -> Callable[..., Any]:
    """Return the implementation of an operation for a tensor's device."""
    if backend == "reference" or (backend == "auto" and not has_triton(op, tensor.device, tensor.dtype)):
        modules = (reference, reference_steps, reference_accept, reference_norm, reference_pointwise)
        return getattr(next(module for module in modules if hasattr(module, op)), op)  # type: ignore[no-any-return]
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'triton', got {backend!r}")
    if op not in TRITON:
        raise RuntimeError(f"{op} has no Triton version; those that have one: {', '.join(sorted(TRITON)) or 'none'}")
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{op} with backend='triton' needs CUDA tensors, got a tensor on {tensor.device}")
    function = getattr(importlib.import_module(TRITON[op]), op)
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return _launched_on(tensor.device, function)
    return function  # type: ignore[no-any-return]


def _launched_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a device the current one during a call: Triton launches there, wherever the tensors are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call


def has_triton(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether "auto" means Triton: for CUDA tensors of an operation that has it, but not in float64."""
    return device.type == "cuda" and op in TRITON and dtype != torch.float64


def check(name: str, tensor: Tensor, kind: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Require a dtype of `kind`, this shape, and the device of `like`."""
    if tensor.shape == shape and tensor.dtype in _KINDS[kind] and tensor.device == like.device:
        return
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")
    message = f"{name} must be {kind}{list(shape)}, got {describe(tensor)}"
    raise (TypeError if tensor.shape == shape else ValueError)(message)


def describe(tensor: Tensor) -> str:
    """Write a tensor as dtype[shape]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def check_rank(name: str, tensor: Tensor, axes: str) -> None:
    """Require as many dimensions as `axes` names, separated by spaces."""
    if tensor.ndim != axes.count(" ") + 1:
        raise ValueError(f"{name} must be [{axes.replace(' ', ', ')}], got {describe(tensor)}")


def check_divides(name: str, part: int, whole_name: str, whole: int) -> None:
    """Require that groups split heads evenly."""
    if part < 1 or whole % part:
        raise ValueError(f"{name} must divide {whole_name}, got {part} and {whole}")


def state_kind(tensor: Tensor) -> str:
    """Name the dtype that a state must have beside inputs like this one."""
    return "float64" if tensor.dtype == torch.float64 else "float32"


def take_topology(parents: Parents, batch: int, first: int, like: Tensor) -> Topology:
    """Check parents and derive the topology where a bare tensor is given."""
    if isinstance(parents, Topology):
        tensor = parents.parents
        trusted = not DEBUG
    else:
        tensor = parents
        trusted = not (reads_freely(tensor) or DEBUG)
    check_batch(batch)
    if tensor.ndim != 2 or tensor.shape[0] != batch or tensor.dtype != torch.int32 or tensor.device != like.device:
        check("parents", tensor, "int32", (batch, tensor.shape[-1] if tensor.ndim else 1), like)
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


def take_path(
    path: Path, path_lengths: Tensor | None, batch: int, like: Tensor, width: int | None = None
) -> AcceptedPath:
    """Check a path and derive its indices where bare tensors are given."""
    check_path(path, path_lengths, batch, like)
    return AcceptedPath.cast(path, path_lengths, width)


def check_batch(batch: int) -> None:
    """Require a batch: there are no shapes to derive from none."""
    if batch < 1:
        raise ValueError(f"the batch must be at least 1, got {batch}")


def check_path(path: Path, path_lengths: Tensor | None, batch: int, like: Tensor) -> None:
    """Require a path of a batch, bare or with its indices."""
    check_batch(batch)
    if isinstance(path, AcceptedPath):
        if path_lengths is not None:
            raise ValueError("path_lengths must be None when path is an AcceptedPath, which holds them")
        check("path", path.rows, "int64", (batch, path.rows.shape[1]), like)
        return
    if path_lengths is None:
        raise ValueError(f"path_lengths must be int32[{batch}], got None")
    check("path", path, "int32", (batch, path.shape[-1] if path.ndim else 1), like)
    check("path_lengths", path_lengths, "int32", (batch,), like)
    if DEBUG:
        _check_nodes(path, path_lengths)


def _check_nodes(path: Tensor, path_lengths: Tensor) -> None:
    """Require lengths that the path has room for and nodes where it says so; reads the values."""
    room = path.shape[1]
    if bool(((path_lengths < 0) | (path_lengths > room)).any()):
        raise ValueError(f"path_lengths must be in [0, {room}], got {path_lengths.tolist()}")
    inside = torch.arange(room, device=path.device) < path_lengths[:, None]
    if bool((inside & (path < 0)).any()):
        raise ValueError(f"path must hold nodes up to path_lengths {path_lengths.tolist()}, got {path.tolist()}")


def check_nodes(name: str, n: int, topology: Topology) -> None:
    """Require as many rows as the trees have nodes."""
    if topology.parents.shape[1] != n:
        batch = topology.parents.shape[0]
        got = describe(topology.parents)
        raise ValueError(f"parents must be int32[{batch}, {n}], for {n} rows of {name}, got {got}")


def check_room(room: int, topology: Topology) -> None:
    """Require a stash that can hold the trees."""
    if topology.parents.shape[1] > room:
        raise ValueError(f"the stash has room for {room} nodes, got a tree of {topology.parents.shape[1]}")


def check_conv(
    window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, sizes: tuple[int, int], like: Tensor
) -> None:
    """Require the operands of a convolution that fit a batch and its channels."""
    batch, channels = sizes
    check_rank("weight", weight, "c w")
    check("weight", weight, "float", (channels, weight.shape[1]), like)
    check("window", window, "float", (batch, channels, weight.shape[1] - 1), like)
    if bias is not None:
        check("bias", bias, "float", (channels,), like)
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")


def check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, rows: int) -> None:
    """Require caches, lengths and queries that agree."""
    batch, _, heads, dim = q.shape
    check_rank("k_cache", k_cache, "b hk L d")
    check_rank("v_cache", v_cache, "b hk L dv")
    kv_heads, context = k_cache.shape[1:3]
    check_divides("heads of k_cache", kv_heads, "heads of q", heads)
    check("q", q, "float", (batch, rows, heads, dim), q)
    check("k_cache", k_cache, "float", (batch, kv_heads, context, dim), q)
    check("v_cache", v_cache, "float", (batch, kv_heads, context, v_cache.shape[3]), q)
    check("lengths", lengths, "int32", (batch,), q)
