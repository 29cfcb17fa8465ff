"""The builds of the norms at the shapes of published models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from aot_build import POINTERS, Build

from stree.kernels.fused.norm import gated_norm_kernel, norm_add_kernel
from stree.kernels.tiles import NormTile


@dataclass(frozen=True, slots=True)
class Norm:
    """Channels of a model's norm, from its published configuration, and whether the norm comes before the gate."""

    channels: int
    groups: int = 1
    norm_first: bool = False


GATED = {
    "mamba2-2.7b": Norm(5120),
    "Nemotron-H-8B": Norm(8192, 8),
    "Bamba-9B": Norm(8192),
    "Granite-4.0-H-tiny": Norm(3072),
    "Zamba2-7B": Norm(7168, 2),
    "Qwen3-Next-80B": Norm(128, norm_first=True),
}
STREAMS = {
    "mamba2-2.7b": Norm(2560),
    "Nemotron-H-8B": Norm(4096),
    "Bamba-9B": Norm(4096),
    "Granite-4.0-H-tiny": Norm(1536),
    "Zamba2-7B": Norm(3584),
    "Qwen3-Next-80B": Norm(2048),
}


def gated_norm_build(norm: Norm, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a gated norm; any number of nodes takes the same build."""
    width = norm.channels // norm.groups
    tile = NormTile.of(width)
    constants = {"WIDTH": width, "BLOCK": tile.width, "NORM_FIRST": norm.norm_first, "SILU": True}
    pointers = dict.fromkeys(("x_ptr", "gate_ptr", "weight_ptr", "y_ptr"), POINTERS[dtype])
    integers = dict.fromkeys(("stride_x_row", "stride_gate_row", "stride_y_row"), norm.channels)
    return Build(gated_norm_kernel, constants, pointers, integers, tile)


def norm_add_build(norm: Norm, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a norm of a residual sum; any number of nodes takes the same build."""
    names = ("x_ptr", "other_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr")
    return _norm_build(norm, dtype, names, ("stride_x_row", "stride_other_row", "stride_residual_row"))


def norm_build(norm: Norm, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a norm of rows; any number of nodes takes the same build."""
    return _norm_build(norm, dtype, ("x_ptr", "weight_ptr", "y_ptr"), ("stride_x_row",))


def _norm_build(norm: Norm, dtype: torch.dtype, pointers: Sequence[str], strides: Sequence[str]) -> Build:
    """Describe a launch of the kernel that adds and normalises; strides of rows that are not there are 0."""
    tile = NormTile.of(norm.channels)
    constants = {"WIDTH": norm.channels, "BLOCK": tile.width}
    absent = dict.fromkeys(("stride_other_row", "stride_residual_row"), 0)
    integers = absent | dict.fromkeys(strides, norm.channels)
    return Build(norm_add_kernel, constants, dict.fromkeys(pointers, POINTERS[dtype]), integers, tile)


BUILDERS = {
    "gated_rms_norm": (gated_norm_build, GATED),
    "rms_norm_add": (norm_add_build, STREAMS),
    "rms_norm": (norm_build, STREAMS),
}
