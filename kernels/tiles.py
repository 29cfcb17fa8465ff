"""Tile sizes of the Triton kernels by shape: a small table in place of tuning at run time.  Imports no Triton.

The entries were chosen for no spills in ahead-of-time builds (`benchmarks/ahead_of_time/table.py`), not by timing: no
GPU figure exists yet.  `benchmarks/gpu/retune_tiles.py` times other entries on a GPU and prints the best.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.step.walk import walk_slots

MAX_NODES, MAX_HEADDIM, MAX_DSTATE = 128, 128, 256
MAX_MIXER_NODES = 16  # of a tree whose scan convolves, too
MAX_ATTENTION_HEADDIMS = (576, 512)  # of keys and of values
MAX_DELTA_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# (nodes padded to a power of two, float32 rows) -> (most headdim, most dstate in a tile, warps, stages).  At 64 nodes
# 8 warps take over 60,000 registers, all of an SM: with tiles of 32 the 80 heads of mamba2-2.7b would be 160 programs,
# two waves on 132 SMs of nearly as many instructions each.
_SSD: dict[tuple[int, bool], tuple[int, int, int, int]] = {
    (16, False): (64, 32, 4, 2),
    (32, False): (64, 32, 4, 2),
    (64, False): (64, 16, 8, 2),  # 32 columns of dstate spill under Triton 3.6
    (128, False): (64, 16, 8, 2),
    (16, True): (64, 16, 4, 2),
    (32, True): (64, 16, 8, 2),  # 4 warps spill
    (64, True): (64, 16, 8, 2),
    (128, True): (64, 16, 8, 2),
}


@dataclass(frozen=True, slots=True)
class SsdTile:
    """What the build of an SSD kernel depends on besides dtypes.

    Attributes:
        nodes: nodes padded to a power of two.
        rows: computed rows padded to a power of two; at most `nodes`.
        path: entries of a path padded to a power of two.
        headdim: columns of a state that a program owns.
        dstate: columns of dstate in a pass of its loop.
        warps: warps a program.
        stages: depth of the pipeline of loads over dstate.
    """

    nodes: int
    rows: int
    path: int
    headdim: int
    dstate: int
    warps: int
    stages: int

    @classmethod
    def of(cls, n: int, rows: int, path: int, headdim: int, dstate: int, dtype: torch.dtype) -> SsdTile:
        """Choose a tile; a dimension of a matrix product has at least 16 entries."""
        nodes = padded(n)
        most_headdim, most_dstate, warps, stages = _SSD[nodes, dtype == torch.float32]
        return cls(
            nodes,
            padded(rows),
            padded(path),
            min(most_headdim, padded(headdim)),
            min(most_dstate, padded(dstate)),
            warps,
            stages,
        )


# nodes in a pass -> (most channels, warps, stages); at most 16 elements a thread.
_CONV: dict[int, tuple[int, int, int]] = dict.fromkeys((1, 2, 4, 8, 16), (64, 4, 1)) | dict.fromkeys(
    (32, 64), (32, 4, 1)
)


@dataclass(frozen=True, slots=True)
class ConvTile:
    """What the build of a convolution kernel depends on besides dtypes.

    Attributes:
        nodes: nodes in a pass of its loop.
        channels: channels that a program owns.
        warps: warps a program.
        stages: depth of the pipeline of loads over nodes.
    """

    nodes: int
    channels: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, channels: int) -> ConvTile:
        """Choose a tile of at most 64 nodes."""
        nodes = min(64, padded(rows, 1))
        most, warps, stages = _CONV[nodes]
        return cls(nodes, min(most, padded(channels, 1)), warps, stages)


# (headdim padded to a power of two, float32 rows) -> (most rows, keys in a pass, warps, stages, precision).
_ATTENTION: dict[tuple[int, bool], tuple[int, int, int, int, str]] = {
    (64, False): (128, 64, 8, 3, "tf32x3"),
    (128, False): (128, 64, 8, 3, "tf32x3"),
    (256, False): (128, 32, 8, 3, "tf32x3"),
    (64, True): (32, 16, 4, 2, "tf32x3"),
    (128, True): (16, 16, 4, 2, "tf32x3"),
    (256, True): (16, 32, 8, 2, "ieee"),  # the halves of a query row of 256 that tf32x3 splits off spill
    (512, False): (32, 32, 8, 2, "tf32x3"),  # 64 rows of 512 sums spill
    (512, True): (16, 16, 8, 2, "ieee"),
}
# The same where a build keeps more in registers: known nodes, one part of the context, or capped scores.
_ATTENTION_TIGHT = {(256, False): (32, 32, 8, 3, "tf32x3")}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """What the build of an attention kernel depends on besides dtypes and head sizes.

    Attributes:
        rows: rows (node and query head) that a program owns.
        keys: keys in a pass of its loops.
        warps: warps a program.
        stages: depth of the pipeline of loads over keys.
        precision: of products of float32 rows.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str

    @classmethod
    def of(cls, rows: int, headdim: int, dtype: torch.dtype, *, is_tight: bool = False) -> AttentionTile:
        """Choose a tile for so many rows and the larger of the head sizes of k and v."""
        key = min(padded(headdim, 64), 512), dtype == torch.float32
        most, keys, warps, stages, precision = (_ATTENTION_TIGHT if is_tight else _ATTENTION).get(key, _ATTENTION[key])
        return cls(min(most, padded(rows)), keys, warps, stages, precision)


# 2^18 states of all sequences or more -> (most states of a program, nodes loaded together, warps).  A thread holds 8
# states, which shares the reading of rows best, or 4 where that would leave much of a GPU idle.
_DIAGONAL: dict[bool, tuple[int, int, int]] = {False: (128, 8, 1), True: (256, 8, 1)}


@dataclass(frozen=True, slots=True)
class DiagonalTile:
    """What the build of a diagonal kernel depends on besides dtypes.

    Attributes:
        channels: channels that a program owns.
        dstate: states of a channel padded to a power of two.
        nodes: nodes in a pass of the loop that stashes.
        ahead: nodes whose rows are loaded together.
        slots: states that are kept at once.
        warps: warps a program.
        stages: unused by these kernels, whose loops load ahead themselves.
    """

    channels: int
    dstate: int
    nodes: int
    ahead: int
    slots: int
    warps: int
    stages: int

    @classmethod
    def of(cls, n: int, dstate: int, channels: int) -> DiagonalTile:
        """Choose a tile for so many channels of all sequences: one warp, which needs no barrier."""
        width = padded(dstate, 1)
        states, ahead, warps = _DIAGONAL[channels * dstate >= 2**18]
        return cls(min(32, max(1, states // width)), width, 16, ahead, walk_slots(n), warps, 1)


# (nodes padded to a power of two, decay a key channel) -> (most dv, most dk in a tile, warps, stages).
_GATED_DELTA: dict[tuple[int, bool], tuple[int, int, int, int]] = {
    (16, False): (64, 32, 4, 2),
    (32, False): (64, 16, 4, 2),
    (64, False): (32, 16, 8, 2),
    (128, False): (32, 16, 8, 2),
    (16, True): (64, 32, 4, 2),
    (32, True): (64, 16, 8, 2),
    (64, True): (32, 16, 8, 2),
    (128, True): (32, 16, 8, 2),
}


@dataclass(frozen=True, slots=True)
class GatedDeltaTile:
    """What the build of a gated delta kernel depends on besides dtypes.

    Attributes:
        nodes: nodes padded to a power of two.
        path: entries of a path padded to a power of two.
        value: columns of a state (dv) that a program owns.
        key: key channels in a pass of its loop.
        warps: warps a program.
        stages: depth of the pipeline of loads over key channels.
    """

    nodes: int
    path: int
    value: int
    key: int
    warps: int
    stages: int

    @classmethod
    def of(cls, n: int, path: int, dk: int, dv: int, channels: bool) -> GatedDeltaTile:
        """Choose a tile; a dimension of a matrix product has at least 16 entries."""
        nodes = padded(n)
        value, key, warps, stages = _GATED_DELTA[nodes, channels]
        return cls(nodes, padded(path), min(value, padded(dv)), min(key, padded(dk)), warps, stages)


def padded(size: int, least: int = 16) -> int:
    """Round up to a power of two."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_kernel_dtypes(op: str, **tensors: Tensor) -> None:
    """Require float32, bfloat16 or float16, the same for all of these tensors."""
    found = {tensor.dtype for tensor in tensors.values()}
    if len(found) > 1 or not found <= set(DTYPES):
        got = ", ".join(f"{name} {str(tensor.dtype)[6:]}" for name, tensor in tensors.items())
        raise TypeError(f"{op} with backend='triton' takes float32, bfloat16 or float16, the same for all, got {got}")


def check_limit(op: str, what: str, size: int, most: int) -> None:
    """Require a size that the kernels have a tile for."""
    if size > most:
        raise NotImplementedError(f"{op} with backend='triton' takes {what} up to {most}, got {size}")


def check_inner(name: str, tensor: Tensor, dims: int = 1) -> None:
    """Require that the last dimensions are contiguous; the leading ones may have any strides."""
    expected = 1
    for dim in range(1, dims + 1):
        if tensor.shape[-dim] > 1 and tensor.numel() and tensor.stride(-dim) != expected:
            last = "dimension" if dims == 1 else f"{dims} dimensions"
            raise ValueError(f"{name} must be contiguous in its last {last}, got strides {tensor.stride()}")
        expected *= tensor.shape[-dim]
