"""Cases of the GPU suite: the steps of recurrent layers, each with the fold of the last path."""

from __future__ import annotations

import gpu_peers
import torch
from gpu_case import PATH, Case, Inputs, Provider, both, draws, tree_inputs
from shapes import Delta, Mixer, Selective

from stree.kernels import ops
from stree.kernels.dispatch import Backend


def ssd_case(model: str, mixer: Mixer, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the Mamba-2 step with its fold."""
    tree = tree_inputs(batch, n, device, mixer.width)

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
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
        {**both(step), **gpu_peers.ssd_peers(mixer, tree["parents"])},
        num_bytes=batch * (8 * h * p * s + n * size * (2 * mixer.channels + h * p) + 4 * n * h),
        flops=batch * (2 * h * p * s * (n + PATH) + 2 * h * n * n * (s + p)),
        terms=s + n + PATH,
        stash_bytes=2 * mixer.channels * size + 4 * h,  # inputs and outputs of the convolution, step sizes
        snapshot_bytes=4 * h * p * s + mixer.channels * (mixer.width - 1) * size,
    )


def conv_case(model: str, mixer: Mixer, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the short convolution with its fold."""
    tree, channels = tree_inputs(batch, n, device, mixer.width), mixer.channels

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
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
        both(step),
        num_bytes=size * channels * (batch * (3 * n + 2 * (mixer.width - 1)) + mixer.width),
        flops=0,
        terms=mixer.width,
    )


def delta_case(model: str, sizes: Delta, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the gated delta step with its fold."""
    tree = tree_inputs(batch, n, device, None)
    hk, hv, dk, dv = sizes.key_heads, sizes.heads, sizes.key_dim, sizes.value_dim
    channels = (dk,) if sizes.per_channel else ()

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
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
    peers = gpu_peers.delta_peers(sizes, tree["parents"])
    return Case(
        "gated_delta_step",
        {"model": model, "batch": batch, "n": n},
        make,
        {**both(step), **peers},
        num_bytes=batch * (8 * hv * dk * dv + n * (2 * stash + 4 * 2 * hk * dk + 2 * size * hv * dv)),
        flops=batch * hv * (2 * dk * dv * (2 * n + PATH) + 2 * n * n * (2 * dk + 2 * dv)),
        terms=dk + 2 * n + PATH,
        stash_bytes=stash + conv,
        snapshot_bytes=4 * hv * dk * dv + 3 * conv,
    )


def selective_case(model: str, sizes: Selective, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the Mamba-1 step with its fold."""
    tree = tree_inputs(batch, n, device, None)
    channels, dstate = sizes.channels, sizes.dstate

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
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
        both(step),
        num_bytes=batch * (8 * channels * dstate + n * (channels * (4 * size + 4) + 3 * dstate * size)),
        flops=0,
        terms=dstate + n + PATH,
        stash_bytes=channels * (size + 4) + dstate * size,
        snapshot_bytes=4 * channels * dstate,
    )


def diagonal_case(model: str, sizes: Selective, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the RG-LRU step with its fold."""
    tree, channels = tree_inputs(batch, n, device, None), sizes.channels

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        return tree | {
            "state": draw(batch, channels, dtype=torch.float32),
            "stash_log_a": -draw(batch, n, channels, dtype=torch.float32).abs() * 0.1,
            "stash_x": draw(batch, n, channels),
            "log_a": -draw(batch, n, channels, dtype=torch.float32).abs() * 0.1,
            "x": draw(batch, n, channels),
        }

    def step(backend: Backend) -> Provider:
        return lambda i: ops.diagonal_step(
            i["state"], i["stash_log_a"], i["stash_x"], i["accepted"], None, i["log_a"], i["x"], i["topology"],
            backend=backend,
        )  # fmt: skip

    size = dtype.itemsize
    return Case(
        "diagonal_step",
        {"model": model, "batch": batch, "n": n},
        make,
        both(step),
        num_bytes=batch * channels * (8 + n * (8 + 3 * size)),
        flops=0,
        terms=n + PATH,
        stash_bytes=channels * (4 + size),
        snapshot_bytes=4 * channels,
    )
