"""What a case of the GPU suite is: inputs, the ways to run them, the right answer, and what any way must move.

The reference in float64 says what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from shapes import binary_tree
from torch import Tensor

from stree.kernels.dispatch import Backend
from stree.kernels.precision import float32_tolerance
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["PATH", "Case", "Inputs", "Provider", "both", "copied", "draws", "tree_inputs", "widened"]

Inputs = dict[str, Any]
Provider = Callable[[Inputs], Tensor]
PATH = 4  # nodes of the folded path
# 16-bit rows have 8 and 11 bits of mantissa, and outputs are rounded to them.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One launch at one size.

    Attributes:
        op: name of the operation.
        params: model, batch and nodes.
        make: inputs from a generator, on the device.
        providers: ways to run it, by name; all give the same output.
        num_bytes: that any version must move through device memory at least.
        flops: of the matrix products; 0 where there is none.
        terms: products in the longest chain of sums; None where the output is copied or drawn, so must be equal.
        stash_bytes: a node's factors, kept until commit.
        snapshot_bytes: a node's full state, as servers keep it.
    """

    op: str
    params: Mapping[str, Any]
    make: Callable[[torch.Generator], Inputs]
    providers: Mapping[str, Provider]
    num_bytes: int
    flops: int
    terms: int | None = None
    stash_bytes: int = 0
    snapshot_bytes: int = 0

    def expected(self, inputs: Inputs) -> Tensor:
        """Compute the output in float64 by the reference."""
        return self.providers["reference"](widened(inputs))

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the largest error, as a share of the largest output, that a provider may have."""
        if self.terms is None:
            return 0.0
        return float32_tolerance(self.terms) if dtype == torch.float32 else TOLERANCE[dtype]


def both(provide: Callable[[Backend], Provider]) -> dict[str, Provider]:
    """Give the two ways that every operation has of its own."""
    return {"triton": provide("triton"), "reference": provide("reference")}


def copied(inputs: Inputs) -> Inputs:
    """Copy the tensors, so that a call may write them."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def widened(inputs: Inputs) -> Inputs:
    """Copy the inputs with floats in float64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in copied(inputs).items()
    }


def tree_inputs(batch: int, n: int, device: torch.device, width: int | None) -> Inputs:
    """Give the topology of binary trees and a path of the tree before, the leftmost one."""
    parents = binary_tree(batch, n, device)
    length = min(PATH, n.bit_length())
    path = torch.tensor([[2**depth - 1 for depth in range(length)]], dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    return {
        "parents": parents,
        "topology": Topology.of(parents, width, jumps=True),
        "accepted": AcceptedPath.of(path.expand(batch, -1), lengths, width),
        "path": path.expand(batch, -1).contiguous(),
        "path_lengths": lengths,
    }


def draws(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Give a function that draws normal numbers of a shape."""

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    return draw
