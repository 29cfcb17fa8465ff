"""Cases of the GPU suite: the steps of recurrent layers, each with its deferred commit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.case import PATH, Case, Draw, Inputs, Size
from benchmarks.shapes import Delta, Mixer, Selective
from stree.kernels import ops
from stree.kernels.dispatch import Backend


def ssd_case(sizes: Mixer, at: Size) -> Case:
    """The Mamba-2 step with its deferred commit."""
    tree, (b, n) = at.tree(sizes.width), (at.batch, at.n)
    h, p, s, channels, size = sizes.heads, sizes.headdim, sizes.dstate, sizes.channels, at.dtype.itemsize

    def make(draw: Draw, wide: Draw) -> Inputs:
        return tree | {
            "state": wide(b, h, p, s), "old_xbc": draw(b, n, channels), "old_dt": wide(b, n, h).abs() * 0.1,
            "stash_xbc": torch.zeros_like(draw(b, n, channels)), "stash_dt": torch.zeros_like(wide(b, n, h)),
            "xbc": draw(b, n, channels), "dt": draw(b, n, h), "A": -wide(h).exp(), "bias": wide(h) - 2, "D": wide(h),
        }  # fmt: skip

    def run(i: Inputs, backend: Backend) -> Tensor:
        return ops.ssd_step(
            i["state"], i["stash_xbc"], i["stash_dt"], i["accepted"], None, i["xbc"], i["dt"], i["A"], i["bias"],
            i["topology"], headdim=p, ngroups=sizes.groups, D=i["D"], previous=(i["old_xbc"], i["old_dt"]),
            backend=backend,
        )  # fmt: skip

    return at.case(
        "ssd_step", make, run, peers=peers.ssd_peers(sizes), terms=s + n + PATH,
        num_bytes=b * (8 * h * p * s + n * size * (2 * channels + h * p) + 4 * n * h),
        flops=b * (2 * h * p * s * (n + PATH) + 2 * h * n * n * (s + p)),
        stash_bytes=2 * channels * size + 4 * h,  # inputs and outputs of the convolution, step sizes
        snapshot_bytes=4 * h * p * s + channels * (sizes.width - 1) * size,
    )  # fmt: skip


def conv_case(sizes: Mixer, at: Size) -> Case:
    """The short convolution with its deferred commit."""
    tree, (b, n, channels, width) = at.tree(sizes.width), (at.batch, at.n, sizes.channels, sizes.width)

    def make(draw: Draw, _: Draw) -> Inputs:
        inputs = {"window": draw(b, channels, width - 1), "stash": draw(b, n, channels), "x": draw(b, n, channels)}
        return tree | inputs | {"weight": draw(channels, width), "bias": draw(channels)}

    def run(i: Inputs, backend: Backend) -> Tensor:
        inputs = (i["window"], i["stash"], i["accepted"], None, i["x"], i["weight"], i["bias"], i["topology"])
        return ops.conv_step(*inputs, backend=backend)

    num_bytes = at.dtype.itemsize * channels * (b * (3 * n + 2 * (width - 1)) + width)
    return at.case("conv_step", make, run, num_bytes, terms=width)


def delta_case(sizes: Delta, at: Size) -> Case:
    """The gated delta step with its deferred commit."""
    tree, (b, n), size = at.tree(), (at.batch, at.n), at.dtype.itemsize
    hk, hv, dk, dv = sizes.key_heads, sizes.heads, sizes.key_dim, sizes.value_dim
    channels = (dk,) if sizes.per_channel else ()

    def make(draw: Draw, wide: Draw) -> Inputs:
        unit = partial(torch.nn.functional.normalize, dim=-1)
        return tree | {
            "state": wide(b, hv, dk, dv) * 0.1, "stash_k": unit(wide(b, n, hk, dk)).to(at.dtype),
            "stash_u": wide(b, n, hv, dv), "stash_g": -wide(b, n, hv, *channels).abs() * 0.1,
            "q": unit(wide(b, n, hk, dk)), "k": unit(wide(b, n, hk, dk)),  # normalised in float32, as by the models
            "v": draw(b, n, hv, dv), "g": -wide(b, n, hv, *channels).abs() * 0.1, "beta": wide(b, n, hv).sigmoid(),
        }  # fmt: skip

    def run(i: Inputs, backend: Backend) -> Tensor:
        old = i["stash_k"], i["stash_u"], i["stash_g"]
        k, u, g = map(torch.empty_like, old)
        return ops.gated_delta_step(
            i["state"], k, u, g, i["accepted"], None, i["q"], i["k"], i["v"], i["g"], i["beta"], i["topology"],
            previous=old, backend=backend,
        )  # fmt: skip

    stash = size * hk * dk + 4 * hv * dv + 4 * hv * (dk if sizes.per_channel else 1)
    conv = size * (2 * hk * dk + hv * dv)  # inputs of the convolution, which are kept too
    return at.case(
        "gated_delta_step", make, run, peers=peers.delta_peers(sizes), terms=dk + 2 * n + PATH,
        num_bytes=b * (8 * hv * dk * dv + n * (2 * stash + 4 * 2 * hk * dk + 2 * size * hv * dv)),
        flops=b * hv * (2 * dk * dv * (2 * n + PATH) + 2 * n * n * (2 * dk + 2 * dv)),
        stash_bytes=stash + conv, snapshot_bytes=4 * hv * dk * dv + 3 * conv,
    )  # fmt: skip


def selective_case(sizes: Selective, at: Size) -> Case:
    """The Mamba-1 step with its deferred commit."""
    tree, (b, n, c, s), size = at.tree(), (at.batch, at.n, sizes.channels, sizes.dstate), at.dtype.itemsize

    def make(draw: Draw, wide: Draw) -> Inputs:
        return tree | {
            "state": wide(b, c, s), "stash_x": draw(b, n, c), "stash_dt": wide(b, n, c).abs() * 0.1,
            "stash_B": draw(b, n, s), "x": draw(b, n, c), "dt": draw(b, n, c) - 2, "A": -wide(c, s).exp(),
            "B": draw(b, n, s), "C": draw(b, n, s), "D": wide(c),
        }  # fmt: skip

    def run(i: Inputs, backend: Backend) -> Tensor:
        old = i["stash_x"], i["stash_dt"], i["stash_B"]
        x, dt, B = map(torch.empty_like, old)
        return ops.selective_step(
            i["state"], x, dt, B, i["accepted"], None, i["x"], i["dt"], i["A"], i["B"], i["C"], None, i["topology"],
            D=i["D"], previous=old, backend=backend,
        )  # fmt: skip

    return at.case(
        "selective_step", make, run, b * (8 * c * s + n * (c * (4 * size + 4) + 3 * s * size)),
        terms=s + n + PATH, stash_bytes=c * (size + 4) + s * size, snapshot_bytes=4 * c * s,
    )  # fmt: skip


def diagonal_case(sizes: Selective, at: Size) -> Case:
    """The RG-LRU step with its deferred commit."""
    tree, (b, n, c), size = at.tree(), (at.batch, at.n, sizes.channels), at.dtype.itemsize

    def make(draw: Draw, wide: Draw) -> Inputs:
        decays = {name: -wide(b, n, c).abs() * 0.1 for name in ("stash_log_a", "log_a")}
        return tree | decays | {"state": wide(b, c), "stash_x": draw(b, n, c), "x": draw(b, n, c)}

    def run(i: Inputs, backend: Backend) -> Tensor:
        inputs = (i["state"], i["stash_log_a"], i["stash_x"], i["accepted"], None, i["log_a"], i["x"], i["topology"])
        return ops.diagonal_step(*inputs, backend=backend)

    return at.case(
        "diagonal_step", make, run, b * c * (8 + n * (8 + 3 * size)),
        terms=n + PATH, stash_bytes=c * (4 + size), snapshot_bytes=4 * c,
    )  # fmt: skip
