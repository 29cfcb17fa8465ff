"""Checks of tensors: shapes, dtypes and devices always, values where the host can read them freely."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read
from stree.kernels.topology import AcceptedPath, Topology

Parents = Tensor | Topology
Path = Tensor | AcceptedPath


def checks_everywhere() -> bool:
    """Whether STREE_DEBUG=1 is set: values are also checked inside the decode loop and on device tensors."""
    return os.environ.get("STREE_DEBUG", "0") == "1"


def checks_values(tensor: Tensor) -> bool:
    """Whether the values of a caller's tensor are checked: where the host can read them freely, or STREE_DEBUG=1."""
    return host_can_read(tensor) or checks_everywhere()


DEBUG = os.environ.get("STREE_DEBUG") == "1"
KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "float32": (torch.float32,),
    "float64": (torch.float64,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
}


def check(name: str, tensor: Tensor, kind: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Require a dtype of `kind`, this shape, and the device of `like`."""
    if tensor.shape == shape and tensor.dtype in KINDS[kind] and tensor.device == like.device:
        return
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")
    message = f"{name} must be {kind}{list(shape)}, got {describe(tensor)}"
    raise (TypeError if tensor.shape == shape else ValueError)(message)


def describe(given: object) -> str:
    """Write a tensor as dtype[shape], and another value as its type."""
    if not isinstance(given, Tensor):
        return type(given).__name__
    return f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)}"


def refuse_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Refuse what is none of a few words."""
    *others, last = map(repr, choices)
    raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_rank(name: str, tensor: Tensor, axes: str) -> None:
    """Require as many dimensions as `axes` names, separated by spaces."""
    if tensor.ndim != axes.count(" ") + 1:
        raise ValueError(f"{name} must be [{axes.replace(' ', ', ')}], got {describe(tensor)}")


def take_topology(parents: Parents, batch: int, first: int, like: Tensor) -> Topology:
    """Check parents and derive the topology where a bare tensor is given."""
    if isinstance(parents, Topology):
        tensor = parents.parents
        trusted = not DEBUG
    else:
        tensor = parents
        trusted = not (host_can_read(tensor) or DEBUG)
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


def take_path(path: Path, path_lengths: Tensor | None, batch: int, like: Tensor) -> AcceptedPath:
    """Check a path and derive its indices where bare tensors are given."""
    check_path(path, path_lengths, batch, like)
    return AcceptedPath.cast(path, path_lengths)


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
    """Require lengths that fit into the path and nodes up to each length; reads the values."""
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
