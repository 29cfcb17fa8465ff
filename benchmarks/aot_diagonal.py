"""The builds of the diagonal scans (Mamba-1, RG-LRU) at the shapes of published models."""

from __future__ import annotations

import torch
from aot_build import POINTERS, Build
from shapes import DIAGONALS, SELECTIVES, Selective

from stree.kernels.diagonal.kernel import diagonal_constants, diagonal_kernel
from stree.kernels.tiles import DiagonalTile

BUILT = SELECTIVES | {"mamba-2.8b, batch 16": Selective(5120, 16, batch=16)}


def selective_build(layer: Selective, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a Mamba-1 step that folds a path and scores n nodes."""
    names = ("step_ptr", "x_ptr", "B_ptr", "C_ptr", "y_ptr", "old_x_ptr", "old_B_ptr", "stash_x_ptr", "stash_B_ptr")
    pointers = dict.fromkeys(names, POINTERS[dtype])
    wide = ("state_ptr", "rate_ptr", "bias_ptr", "D_ptr", "old_step_ptr", "stash_step_ptr")
    return _build(layer, n, pointers | dict.fromkeys(wide, "*fp32"), selective=True)


def diagonal_build(layer: Selective, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of an RG-LRU step that folds a path and scores n nodes."""
    pointers = dict.fromkeys(("x_ptr", "y_ptr", "old_x_ptr", "stash_x_ptr"), POINTERS[dtype])
    wide = ("state_ptr", "step_ptr", "old_step_ptr", "stash_step_ptr")
    return _build(layer, n, pointers | dict.fromkeys(wide, "*fp32"), selective=False)


def _build(layer: Selective, n: int, pointers: dict[str, str], *, selective: bool) -> Build:
    """Describe the launch of a step with these rows."""
    tile = DiagonalTile.of(n, layer.dstate, layer.batch * layer.channels)
    constants = diagonal_constants(
        tile, layer.dstate, selective=selective, fold=True, scan=True, keep=True, keep_shared=True, known=False
    )
    pointers |= {"walk_ptr": "*i32", "path_ptr": "*i64", "lengths_ptr": "*i64"}
    strides = (name for name in diagonal_kernel.arg_names if name.startswith("stride_"))
    integers = dict.fromkeys(strides, layer.channels * layer.dstate)
    integers |= {"n": n, "first": 0, "new_from": 0, "path_size": 16, "channels": layer.channels}
    return Build(diagonal_kernel, constants, pointers, integers, tile)


BUILDERS = {"selective_step": (selective_build, BUILT), "diagonal_step": (diagonal_build, DIAGONALS)}
