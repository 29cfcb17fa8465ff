"""Tile sizes of the kernels around a layer's matrix products.  Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stree.kernels.tiles import padded

MAX_NORM_WIDTH = 16384


@dataclass(frozen=True, slots=True)
class NormTile:
    """What the build of a norm depends on besides dtypes.

    Attributes:
        width: channels of a group padded to a power of two.
        warps: warps a program.
        stages: unused; there is no loop.
    """

    width: int
    warps: int
    stages: int

    @classmethod
    def of(cls, width: int) -> NormTile:
        """Choose as many warps as leave a thread 16 channels, up to 16."""
        block = padded(width, 1)
        return cls(block, min(16, max(1, block // 512)), 1)


@dataclass(frozen=True, slots=True)
class RotaryTile:
    """What the build of a rotation depends on besides dtypes.

    Attributes:
        heads: heads that a program owns.
        dim: columns of a head padded to a power of two.
        warps: warps a program.
        stages: unused; there is no loop.
    """

    heads: int
    dim: int
    warps: int
    stages: int

    @classmethod
    def of(cls, heads: int, dim: int) -> RotaryTile:
        """Choose as many heads as make about a thousand columns, eight a thread."""
        width = padded(dim, 1)
        block = min(padded(heads, 1), max(1, 1024 // width))
        return cls(block, width, max(1, min(4, block * width // 256)), 1)


@dataclass(frozen=True, slots=True)
class DeltaInputsTile:
    """What the build of what delta rules take depends on besides dtypes.

    Attributes:
        heads: key heads that a program owns.
        dim: key channels of a head padded to a power of two.
        values: value heads padded to a power of two.
        warps: warps a program.
        stages: unused; there is no loop.
    """

    heads: int
    dim: int
    values: int
    warps: int
    stages: int

    @classmethod
    def of(cls, key_heads: int, dk: int, heads: int) -> DeltaInputsTile:
        """Choose as many heads as make about five hundred channels, four a thread."""
        width = padded(dk, 1)
        return cls(min(padded(key_heads, 1), max(1, 512 // width)), width, padded(heads, 1), 4, 1)


@dataclass(frozen=True, slots=True)
class ExpertsTile:
    """What the builds of a mixture of experts depend on besides dtypes and the model's sizes.

    Attributes:
        rows: rows of an expert in one pass over its weights; the least of a matrix product.
        block: output channels that a program owns.
        depth: channels summed in a pass of the loop.
        chunk: routed pairs looked at together.
        warps: warps a program.
        stages: depth of the pipeline of loads.
    """

    rows: int
    block: int
    depth: int
    chunk: int
    warps: int
    stages: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> ExpertsTile:
        """Choose tiles that leave enough programs for one row's experts to fill a chip."""
        return cls(16, 32, 128 if dtype.itemsize == 2 else 32, 128, 4, 4)


@dataclass(frozen=True, slots=True)
class PointwiseTile:
    """What the build of a gated activation depends on besides dtypes.

    Attributes:
        channels: channels that a program owns.
        warps: warps a program.
        stages: unused; there is no loop.
    """

    channels: int = 1024
    warps: int = 4
    stages: int = 1
