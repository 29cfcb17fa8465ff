"""A case of the GPU suite: one operation at one size, with its inputs, providers, expected output and cost.

The reference in float64 gives the expected output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stree.bench.device_clock import binary_parents, time_graph
from stree.bench.records import Record
from stree.kernels.dispatch import Backend
from stree.kernels.precision import float32_tolerance
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["CACHE_BYTES", "PATH", "Case", "Inputs", "Provider", "Size", "copied", "normal"]

Inputs = dict[str, Any]
Provider = Callable[[Inputs], Tensor]
Draw = Callable[..., Tensor]
PATH = 4  # nodes of the committed path
CACHE_BYTES = 256 << 20  # four times the second-level cache of an H200
# 16-bit rows have 8 and 11 bits of mantissa, and outputs are rounded to them.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        op: name of the operation.
        params: model, batch and nodes.
        make: inputs from a generator, on the device.
        providers: ways to run it, by name; all give the same output.
        num_bytes: least bytes that any version moves through device memory.
        flops: of the matrix products; 0 where there is none.
        terms: products in the longest chain of sums; None where the output is copied or drawn, so must be equal.
        stash_bytes: a node's factors, kept until commit.
        snapshot_bytes: a node's full state, as servers keep it.
    """

    op: str
    params: Record
    make: Callable[[torch.Generator | None], Inputs]
    providers: Mapping[str, Provider]
    num_bytes: int
    flops: int = 0
    terms: int | None = None
    stash_bytes: int = 0
    snapshot_bytes: int = 0

    def expected(self, inputs: Inputs) -> Tensor:
        """Output of the reference in float64."""
        wide = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in copied(inputs).items()
        }
        return self.providers["reference"](wide)

    def tolerance(self, dtype: torch.dtype) -> float:
        """Largest error, as a share of the largest output, that a provider may have."""
        if self.terms is None:
            return 0.0
        return float32_tolerance(self.terms) if dtype == torch.float32 else TOLERANCE[dtype]

    def compared(self, output: Tensor, expected: Tensor, dtype: torch.dtype) -> Record:
        """The largest error of an output, as a share of the largest expected value, and whether it is small enough."""
        error = float((output.double() - expected).abs().max() / expected.abs().max())
        return {"error": error, "correct": error <= self.tolerance(dtype)}

    def input_sets(self, generator: torch.Generator, most: int = 256) -> list[Inputs]:
        """Inputs that together exceed the cache; one set where there is no GPU."""
        count = min(most, CACHE_BYTES // max(self.num_bytes, 1)) if generator.device.type == "cuda" else 1
        return [self.make(generator) for _ in range(max(count, 1))]

    def timed(self, provider: Provider, sets: Sequence[Inputs], device: torch.device) -> Record:
        """Time a call of a provider in microseconds: on a GPU by a graph of a call on each set, else by plain calls."""

        def calls() -> None:
            for inputs in sets:
                provider(inputs)

        record = time_graph(calls, device, len(sets))
        is_cached = len(sets) * self.num_bytes < CACHE_BYTES // 2
        record |= {} if is_cached else {"gb_per_s": self.num_bytes / record["p50"] / 1e3}
        return {"metric": "latency", "unit": "us", **record}


@dataclass(frozen=True)
class Size:
    """Where a case runs: a model's name, batch, nodes, dtype and device; on "meta" nothing is computed."""

    model: str
    batch: int
    n: int
    dtype: torch.dtype
    device: torch.device
    more: Record = field(default_factory=dict)

    def tree(self, conv_width: int | None = None) -> Inputs:
        """Indices of binary trees, and of an accepted path of the tree before: the leftmost one."""
        length = min(PATH, self.n.bit_length())
        parents = binary_parents(self.batch, self.n, self.device)
        nodes = [[2**depth - 1 for depth in range(length)]] * self.batch
        path = torch.tensor(nodes, dtype=torch.int32, device=self.device)
        lengths = torch.full((self.batch,), length, dtype=torch.int32, device=self.device)
        return {
            "parents": parents,
            "topology": Topology.of(parents, conv_width),
            "accepted": AcceptedPath.of(path, lengths, conv_width),
            "path": path,
            "path_lengths": lengths,
        }

    def case(
        self, op: str, make: Callable[[Draw, Draw], Inputs], run: Callable[[Inputs, Backend], Tensor], num_bytes: int,
        peers: Mapping[str, Provider] | None = None, **more: Any,
    ) -> Case:  # fmt: skip
        """A case of an operation with two implementations of ours.

        Args:
            op: its name.
            make: inputs, from functions that draw normal numbers of a shape in the case's dtype and in float32.
            run: calls it.
            num_bytes: see `Case`.
            peers: other libraries' providers.
            more: other attributes of the case.
        """
        ours: dict[str, Provider] = {
            "triton": lambda inputs: run(inputs, "triton"), "reference": lambda inputs: run(inputs, "reference"),
        }  # fmt: skip
        return Case(
            op,
            {"model": self.model, "batch": self.batch, "n": self.n, **self.more},
            lambda generator: make(normal(generator, self.dtype), normal(generator, torch.float32)),
            {**ours, **(peers or {})},
            num_bytes,
            **more,
        )


def copied(inputs: Inputs) -> Inputs:
    """Copy the tensors, so that a call may write them."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def normal(generator: torch.Generator | None, dtype: torch.dtype) -> Draw:
    """A function that draws normal numbers of a shape; without a generator on the meta device."""

    def draw(*shape: int) -> Tensor:
        if generator is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    return draw
