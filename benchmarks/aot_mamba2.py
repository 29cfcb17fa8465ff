"""The builds of the Mamba-2 operations at the shapes of published models."""

from __future__ import annotations

import torch
from aot_attention import Launch
from aot_build import POINTERS, Build
from shapes import MIXERS, Mixer

from stree.kernels.bookkeeping import ROW_COLUMNS
from stree.kernels.bookkeeping_kernels import rows_kernel
from stree.kernels.conv.kernel import conv_constants, conv_kernel
from stree.kernels.mamba2.kernel import ssd_constants, ssd_kernel
from stree.kernels.tiles import ConvTile, SsdTile


def ssd_build(mixer: Mixer, n: int, dtype: torch.dtype, path: int = 16) -> Build:
    """Describe the launch of a step that folds a path and scores n nodes."""
    tile = SsdTile.of(n, n, path, mixer.headdim, mixer.dstate, dtype)
    constants = ssd_constants(
        tile, mixer.headdim, mixer.dstate, mixer.heads // mixer.groups, n,
        fold=True, scan=True, keep=True, keep_shared=True, known=False, dtype=dtype,
    )  # fmt: skip
    rows = POINTERS[dtype]
    pointers = dict.fromkeys(("state_ptr", "A_ptr", "bias_ptr", "D_ptr", "old_dt_ptr", "stash_dt_ptr"), "*fp32")
    pointers |= dict.fromkeys(
        ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "y_ptr", "stash_ptr", "old_x_ptr", "old_B_ptr"), rows
    )
    pointers |= {"bits_ptr": "*i32", "path_ptr": "*i64", "lengths_ptr": "*i64"}
    integers = dict.fromkeys((name for name in ssd_kernel.arg_names if name.startswith("stride_")), mixer.channels)
    integers |= {"stride_dt_n": mixer.heads, "stride_old_dt_n": mixer.heads}
    integers |= {"n": n, "first": 0, "new_from": 0, "path_size": path, "nheads": mixer.heads}
    return Build(ssd_kernel, constants, pointers, integers, tile)


def conv_build(mixer: Mixer, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a convolution that folds a path and serves n nodes."""
    tile = ConvTile.of(n, mixer.channels)
    constants = conv_constants(tile, mixer.width, fold=True, scan=True, keep=True, silu=True, known=False)
    rows = POINTERS[dtype]
    names = ("window_ptr", "old_ptr", "x_ptr", "weight_ptr", "bias_ptr", "stash_ptr", "y_ptr")
    pointers = dict.fromkeys(names, rows) | {"path_ptr": "*i64", "lengths_ptr": "*i64", "index_ptr": "*i64"}
    integers = dict.fromkeys((name for name in conv_kernel.arg_names if name.startswith("stride_")), mixer.channels)
    integers |= {"n": n, "first": 0, "new_from": 0, "path_size": 16, "channels": mixer.channels}
    return Build(conv_kernel, constants, pointers, integers, tile)


def rows_build(mixer: Mixer, n: int, dtype: torch.dtype) -> Build:
    """Describe the copy of a waiting path's rows; the build is the same for all trees."""
    rows = POINTERS[dtype]
    pointers = {"nodes_ptr": "*i64", "source_ptr": rows, "rows_ptr": rows, "source2_ptr": "*fp32", "rows2_ptr": "*fp32"}
    integers = {"width": mixer.channels, "width2": mixer.heads, "batch": 1, "inner": 1, "nodes": n}
    constants = {"ENTRIES": 16, "COLUMNS": ROW_COLUMNS}
    return Build(rows_kernel, constants, pointers, integers, Launch(ROW_COLUMNS, 4))


BUILDERS = {
    "ssd_step": (ssd_build, MIXERS),
    "conv_step": (conv_build, MIXERS),
    "copy_rows": (rows_build, MIXERS),
}
