"""What the GPU suite times: each operation's step at published shapes, with the bytes and operations that it must do.

A case makes inputs, runs them by any provider, and says what the right answer is: the reference in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gpu_peers
import torch
from shapes import ATTENTIONS, DELTAS, MIXERS, SELECTIVES, Attention, Delta, Mixer, Selective, binary_tree
from torch import Tensor

from stree.kernels import ops
from stree.kernels.checks import Backend
from stree.kernels.topology import AcceptedPath, Topology

Inputs = dict[str, Any]
Provider = Callable[[Inputs], Tensor]
PATH, CONTEXT = 4, 4096  # nodes of the folded path; tokens of context


@dataclass(frozen=True)
class Case:
    """One launch at one size.

    Attributes:
        op: name of the operation.
        params: model, batch and nodes.
        make: inputs from a generator, on the device.
        providers: ways to run it, by name; all give the same output.
        num_bytes: that any version must move through device memory at least.
        flops: of the matrix products.
        stash_bytes: a node's factors, kept until commit.
        snapshot_bytes: a node's full state, as servers keep it.
    """

    op: str
    params: Mapping[str, Any]
    make: Callable[[torch.Generator], Inputs]
    providers: Mapping[str, Provider]
    num_bytes: int
    flops: int
    stash_bytes: int = 0
    snapshot_bytes: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def expected(self, inputs: Inputs) -> Tensor:
        """Compute the output in float64 by the reference."""
        return self.providers["reference"](widened(inputs))


def copied(inputs: Inputs) -> Inputs:
    """Copy the tensors, so that a call may write them."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}


def widened(inputs: Inputs) -> Inputs:
    """Copy the inputs with floats in float64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in copied(inputs).items()
    }


def _tree(batch: int, n: int, device: torch.device, width: int | None) -> Inputs:
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


def _draws(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Give a function that draws normal numbers of a shape."""

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)

    return draw


def ssd_case(model: str, mixer: Mixer, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the Mamba-2 step with its fold."""
    tree = _tree(batch, n, device, mixer.width)

    def make(generator: torch.Generator) -> Inputs:
        draw = _draws(generator, dtype)
        return tree | {
            "state": draw(batch, mixer.heads, mixer.headdim, mixer.dstate, dtype=torch.float32),
            "old_xbc": draw(batch, n, mixer.channels),
            "old_dt": draw(batch, n, mixer.heads, dtype=torch.float32).abs() * 0.1,
            "stash_xbc": torch.zeros(batch, n, mixer.channels, dtype=dtype, device=device),
            "stash_dt": torch.zeros(batch, n, mixer.heads, device=device),
            "xbc": draw(batch, n, mixer.channels),
            "dt": draw(batch, n, mixer.heads),
            "A": -draw(mixer.heads, dtype=torch.float32).exp(),
            "bias": draw(mixer.heads, dtype=torch.float32) - 2,
            "D": draw(mixer.heads, dtype=torch.float32),
        }

    def step(backend: Backend) -> Provider:
        return lambda i: ops.ssd_step(
            i["state"], i["stash_xbc"], i["stash_dt"], i["accepted"], None, i["xbc"], i["dt"], i["A"], i["bias"],
            i["topology"], headdim=mixer.headdim, ngroups=mixer.groups, D=i["D"],
            folded=(i["old_xbc"], i["old_dt"]), backend=backend,
        )  # fmt: skip

    size, h, p, s = dtype.itemsize, mixer.heads, mixer.headdim, mixer.dstate
    return Case(
        "ssd_step",
        {"model": model, "batch": batch, "n": n},
        make,
        {"triton": step("triton"), "reference": step("reference"), **gpu_peers.ssd_peers(mixer, tree["parents"])},
        num_bytes=batch * (8 * h * p * s + n * size * (2 * mixer.channels + h * p) + 4 * n * h),
        flops=batch * (2 * h * p * s * (n + PATH) + 2 * h * n * n * (s + p)),
        stash_bytes=2 * mixer.channels * size + 4 * h,  # inputs and outputs of the convolution, step sizes
        snapshot_bytes=4 * h * p * s + mixer.channels * (mixer.width - 1) * size,
    )


def conv_case(model: str, mixer: Mixer, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the short convolution with its fold."""
    tree, channels = _tree(batch, n, device, mixer.width), mixer.channels

    def make(generator: torch.Generator) -> Inputs:
        draw = _draws(generator, dtype)
        return tree | {
            "window": draw(batch, channels, mixer.width - 1),
            "stash": draw(batch, n, channels),
            "x": draw(batch, n, channels),
            "weight": draw(channels, mixer.width),
            "bias": draw(channels),
        }

    def step(backend: Backend) -> Provider:
        return lambda i: ops.conv_step(
            i["window"], i["stash"], i["accepted"], None, i["x"], i["weight"], i["bias"], i["topology"],
            backend=backend,
        )  # fmt: skip

    size = dtype.itemsize
    return Case(
        "conv_step",
        {"model": model, "batch": batch, "n": n},
        make,
        {"triton": step("triton"), "reference": step("reference")},
        num_bytes=size * channels * (batch * (3 * n + 2 * (mixer.width - 1)) + mixer.width),
        flops=2 * batch * n * channels * mixer.width,
    )


def delta_case(model: str, sizes: Delta, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the gated delta step with its fold."""
    tree = _tree(batch, n, device, None)
    hk, hv, dk, dv = sizes.key_heads, sizes.heads, sizes.key_dim, sizes.value_dim
    channels = (dk,) if sizes.per_channel else ()

    def make(generator: torch.Generator) -> Inputs:
        draw = _draws(generator, dtype)
        unit = torch.nn.functional.normalize
        return tree | {
            "state": draw(batch, hv, dk, dv, dtype=torch.float32) * 0.1,
            "stash_k": unit(draw(batch, n, hk, dk).float(), dim=-1).to(dtype),
            "stash_u": draw(batch, n, hv, dv, dtype=torch.float32),
            "stash_g": -draw(batch, n, hv, *channels, dtype=torch.float32).abs() * 0.1,
            "q": unit(draw(batch, n, hk, dk).float(), dim=-1),  # as the models call it: normalised in float32
            "k": unit(draw(batch, n, hk, dk).float(), dim=-1),
            "v": draw(batch, n, hv, dv),
            "g": -draw(batch, n, hv, *channels, dtype=torch.float32).abs() * 0.1,
            "beta": draw(batch, n, hv, dtype=torch.float32).sigmoid(),
        }

    def step(backend: Backend) -> Provider:
        return lambda i: ops.gated_delta_step(
            i["state"], i["stash_k"], i["stash_u"], i["stash_g"], i["accepted"], None,
            i["q"], i["k"], i["v"], i["g"], i["beta"], i["topology"], backend=backend,
        )  # fmt: skip

    size = dtype.itemsize
    stash = size * hk * dk + 4 * hv * dv + 4 * hv * (dk if sizes.per_channel else 1)
    conv = size * (2 * hk * dk + hv * dv)  # inputs of the convolution, which are kept too
    peers = {} if sizes.per_channel else gpu_peers.delta_peers(tree["parents"])
    return Case(
        "gated_delta_step",
        {"model": model, "batch": batch, "n": n},
        make,
        {"triton": step("triton"), "reference": step("reference"), **peers},
        num_bytes=batch * (8 * hv * dk * dv + n * (2 * stash + 4 * 2 * hk * dk + 2 * size * hv * dv)),
        flops=batch * hv * (2 * dk * dv * (2 * n + PATH) + 2 * n * n * (2 * dk + 2 * dv)),
        stash_bytes=stash + conv,
        snapshot_bytes=4 * hv * dk * dv + 3 * conv,
    )


def selective_case(model: str, sizes: Selective, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the Mamba-1 step with its fold."""
    tree = _tree(batch, n, device, None)
    channels, dstate = sizes.channels, sizes.dstate

    def make(generator: torch.Generator) -> Inputs:
        draw = _draws(generator, dtype)
        return tree | {
            "state": draw(batch, channels, dstate, dtype=torch.float32),
            "stash_x": draw(batch, n, channels),
            "stash_dt": draw(batch, n, channels, dtype=torch.float32).abs() * 0.1,
            "stash_B": draw(batch, n, dstate),
            "x": draw(batch, n, channels),
            "dt": draw(batch, n, channels) - 2,
            "A": -draw(channels, dstate, dtype=torch.float32).exp(),
            "B": draw(batch, n, dstate),
            "C": draw(batch, n, dstate),
            "D": draw(channels, dtype=torch.float32),
        }

    def step(backend: Backend) -> Provider:
        return lambda i: ops.selective_step(
            i["state"], i["stash_x"], i["stash_dt"], i["stash_B"], i["accepted"], None,
            i["x"], i["dt"], i["A"], i["B"], i["C"], None, i["topology"], D=i["D"], backend=backend,
        )  # fmt: skip

    size = dtype.itemsize
    return Case(
        "selective_step",
        {"model": model, "batch": batch, "n": n},
        make,
        {"triton": step("triton"), "reference": step("reference")},
        num_bytes=batch * (8 * channels * dstate + n * (channels * (4 * size + 4) + 3 * dstate * size)),
        flops=batch * 6 * (n + PATH) * channels * dstate,
        stash_bytes=channels * (size + 4) + dstate * size,
        snapshot_bytes=4 * channels * dstate,
    )


def attention_case(model: str, sizes: Attention, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time tree attention over a context."""
    tree, (heads, kv_heads, dim) = _tree(batch, n, device, None), (sizes.heads, sizes.kv_heads, sizes.headdim)

    def make(generator: torch.Generator) -> Inputs:
        draw = _draws(generator, dtype)
        return tree | {
            "k_cache": draw(batch, kv_heads, CONTEXT, dim),
            "v_cache": draw(batch, kv_heads, CONTEXT, dim),
            "lengths": torch.full((batch,), CONTEXT - 1, dtype=torch.int32, device=device),
            "stash_k": draw(batch, n, kv_heads, dim),
            "stash_v": draw(batch, n, kv_heads, dim),
            "q": draw(batch, n, heads, dim),
            "k": draw(batch, n, kv_heads, dim),
            "v": draw(batch, n, kv_heads, dim),
        }

    def step(backend: Backend) -> Provider:
        return lambda i: ops.attention_step(
            i["k_cache"], i["v_cache"], i["lengths"], i["stash_k"], i["stash_v"], None, None,
            i["q"], i["k"], i["v"], i["topology"], scale=dim**-0.5, backend=backend,
        )  # fmt: skip

    size = dtype.itemsize
    return Case(
        "attention_step",
        {"model": model, "batch": batch, "n": n, "context": CONTEXT},
        make,
        {"triton": step("triton"), "reference": step("reference"), **(gpu_peers.attention_peers() if n == 1 else {})},
        num_bytes=batch * size * (2 * kv_heads * CONTEXT * dim + n * (4 * kv_heads * dim + 2 * heads * dim)),
        flops=4 * batch * heads * n * (CONTEXT + n) * dim,
    )


KINDS: list[tuple[Callable[..., Case], Mapping[str, Any]]] = [
    (ssd_case, MIXERS),
    (delta_case, DELTAS),
    (attention_case, ATTENTIONS),
    (selective_case, SELECTIVES),
    (conv_case, MIXERS),
]
SMALL: list[tuple[Callable[..., Case], Mapping[str, Any]]] = [
    (ssd_case, {"tiny": Mixer(2, 16, 16, 1)}),
    (delta_case, {"tiny": Delta(1, 2, 16, 16), "tiny-kda": Delta(2, 2, 16, 16, per_channel=True)}),
    (attention_case, {"tiny": Attention(2, 1, 64)}),
    (selective_case, {"tiny": Selective(32, 16)}),
    (conv_case, {"tiny": Mixer(2, 16, 16, 1)}),
]


def cases(
    kinds: list[tuple[Callable[..., Case], Mapping[str, Any]]],
    sizes: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Case]:
    """List cases: for each (batch, nodes) the first model of every kind first, so that an early end leaves a sample."""
    for batch, n in sizes:
        for place in range(max(len(shapes) for _, shapes in kinds)):
            for make, shapes in kinds:
                if place < len(shapes):
                    model = list(shapes)[place]
                    yield make(model, shapes[model], batch, n, dtype, device)
