"""Cases of the GPU suite: what lean layers run: rotary positions, activations, mixtures of experts."""

from __future__ import annotations

import torch
from gpu_case import Case, Inputs, Provider, both, draws
from shapes import Attention, Delta, Experts, FeedForward

from stree.kernels import ops
from stree.kernels.dispatch import Backend


def rotary_case(model: str, sizes: Attention, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the rotation of all columns of queries and keys, as they stand after their projections."""
    dim = sizes.headdim

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        q, k = (draw(batch, n, heads, dim).transpose(1, 2) for heads in (sizes.heads, sizes.kv_heads))
        return {"q": q, "k": k, "cos": draw(batch, n, dim), "sin": draw(batch, n, dim)}

    def turn(backend: Backend) -> Provider:
        def run(i: Inputs) -> torch.Tensor:
            turned = ops.rotary(i["q"], i["k"], i["cos"], i["sin"], backend=backend)
            return turned[0] if sizes.heads > sizes.kv_heads else turned[1]

        return run

    return Case(
        "rotary",
        {"model": model, "batch": batch, "n": n},
        make,
        both(turn),
        num_bytes=2 * batch * n * dim * (sizes.heads + sizes.kv_heads + 1) * dtype.itemsize,
        flops=0,
        terms=2,
    )


def activation_case(
    model: str, sizes: FeedForward, batch: int, n: int, dtype: torch.dtype, device: torch.device
) -> Case:
    """Time what stands between the projections of a feed-forward."""
    tensors = 3 if sizes.gated else 2

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        up = {"up": draw(batch, n, sizes.channels)} if sizes.gated else {}
        return {"gate": draw(batch, n, sizes.channels), **up}

    def act(backend: Backend) -> Provider:
        return lambda i: ops.gated_activation(i["gate"], i.get("up"), activation=sizes.activation, backend=backend)

    return Case(
        "gated_activation",
        {"model": model, "batch": batch, "n": n},
        make,
        both(act),
        num_bytes=tensors * batch * n * sizes.channels * dtype.itemsize,
        flops=0,
        terms=1,
    )


def delta_inputs_case(model: str, sizes: Delta, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time what a delta rule takes from its projections; KDA's decays come from elsewhere."""
    heads, keys = sizes.heads, sizes.key_heads * sizes.key_dim

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        rates = {} if sizes.per_channel else {"a": draw(batch, n, heads), "A_log": draw(heads), "dt_bias": draw(heads)}
        return {"qk": draw(batch, n, 2 * keys), "b": draw(batch, n, heads), **rates}

    def prepare(backend: Backend) -> Provider:
        def run(i: Inputs) -> torch.Tensor:
            rates = (i.get("a"), i.get("A_log"), i.get("dt_bias"))
            made = ops.delta_inputs(i["qk"], i["b"], *rates, key_heads=sizes.key_heads, backend=backend)
            return torch.cat([part.flatten(2) for part in made if part is not None], -1)

        return run

    read, written = 2 * keys + heads, 2 * keys + heads
    decays = 0 if sizes.per_channel else heads
    return Case(
        "delta_inputs",
        {"model": model, "batch": batch, "n": n},
        make,
        both(prepare),
        num_bytes=batch * n * ((read + decays) * dtype.itemsize + (written + decays) * 4),
        flops=0,
        terms=sizes.key_dim,
    )


def experts_case(model: str, sizes: Experts, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time a mixture of experts under uniform routing; bytes are those of as many experts as that reaches."""
    rows = batch * n

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        scores = torch.rand(rows, sizes.count, generator=generator, device=generator.device)
        return {
            "x": draw(rows, sizes.channels),
            "index": scores.topk(sizes.share).indices,
            "weights": draw(rows, sizes.share),
            "up": draw(sizes.count, 2 * sizes.inner, sizes.channels) / sizes.channels**0.5,
            "down": draw(sizes.count, sizes.channels, sizes.inner) / sizes.inner**0.5,
        }

    def mix(backend: Backend) -> Provider:
        return lambda i: ops.experts(i["x"], i["index"], i["weights"], i["up"], i["down"], backend=backend)

    reached = sizes.count * (1 - (1 - sizes.share / sizes.count) ** rows)
    weights = 3 * reached * sizes.inner * sizes.channels
    return Case(
        "experts",
        {"model": model, "batch": batch, "n": n},
        make,
        both(mix),
        num_bytes=round((weights + 2 * rows * sizes.channels) * dtype.itemsize),
        flops=6 * rows * sizes.share * sizes.inner * sizes.channels,
        terms=sizes.channels + sizes.inner,
    )
