"""Cases of the GPU suite: attention and its commit, norms, acceptance."""

from __future__ import annotations

import gpu_peers
import torch
from gpu_case import PATH, Case, Inputs, Provider, both, draws, tree_inputs
from shapes import Attention, Mixer
from torch import Tensor

from stree.kernels import accept_door, ops
from stree.kernels.attention.kernel import split_context
from stree.kernels.dispatch import Backend
from stree.kernels.tiles import AttentionTile


def attention_case(model: str, sizes: Attention, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time tree attention over a context; values of latent attention are the first columns of the keys."""
    tree, (heads, kv_heads, dim) = tree_inputs(batch, n, device, None), (sizes.heads, sizes.kv_heads, sizes.headdim)

    def values(i: Inputs, name: str) -> Tensor:
        found: Tensor = i["k" + name[1:]][..., : sizes.latent] if sizes.latent else i[name]
        return found

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        keys = {
            "k_cache": draw(batch, kv_heads, sizes.context, dim),
            "k_stash": draw(batch, n, kv_heads, dim),
            "k": draw(batch, n, kv_heads, dim),
        }
        lengths = torch.full((batch,), sizes.context - 1, dtype=torch.int32, device=device)
        own = {} if sizes.latent else {"v" + name[1:]: draw(*key.shape) for name, key in keys.items()}
        return tree | keys | own | {"lengths": lengths, "q": draw(batch, n, heads, dim)}

    def step(backend: Backend) -> Provider:
        return lambda i: ops.attention_step(
            i["k_cache"], values(i, "v_cache"), i["lengths"], i["k_stash"], values(i, "v_stash"), None, None,
            i["q"], i["k"], values(i, "v"), i["topology"], scale=dim**-0.5, backend=backend,
        )  # fmt: skip

    size, value_dim, own_values = dtype.itemsize, sizes.value_dim, 0 if sizes.latent else dim
    tile = AttentionTile.of(n * heads // kv_heads, dim, dtype)
    blocks = -(-n * heads // kv_heads // tile.rows)
    peers = gpu_peers.attention_peers() if n == 1 and not sizes.latent else {}
    return Case(
        "attention_step",
        {"model": model, "batch": batch, "n": n, "context": sizes.context},
        make,
        {**both(step), **peers},
        num_bytes=batch
        * size
        * (kv_heads * (sizes.context + 2 * n) * (dim + own_values) + n * heads * (dim + value_dim)),
        flops=2 * batch * heads * n * (sizes.context + n) * (dim + value_dim),
        terms=dim + n + split_context(sizes.context, blocks * batch * kv_heads, tile.keys)[1],
    )


def commit_case(model: str, sizes: Attention, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the append of a path's keys and values."""
    tree, (kv_heads, dim) = tree_inputs(batch, n, device, None), (sizes.kv_heads, sizes.headdim)

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        cache, rows = (batch, kv_heads, 256, dim), (batch, n, kv_heads, dim)
        names = {"k_cache": cache, "v_cache": cache, "k": rows, "v": rows}
        lengths = torch.full((batch,), 200, dtype=torch.int32, device=device)
        return tree | {name: draw(*shape) for name, shape in names.items()} | {"lengths": lengths}

    def commit(backend: Backend) -> Provider:
        def run(i: Inputs) -> Tensor:
            new = i["k"], i["v"], i["path"], i["path_lengths"]
            ops.kv_commit(i["k_cache"], i["v_cache"], i["lengths"], *new, backend=backend)
            return i["v_cache"]  # type: ignore[no-any-return]

        return run

    return Case(
        "kv_commit",
        {"model": model, "batch": batch, "n": n},
        make,
        both(commit),
        num_bytes=4 * batch * min(PATH, n.bit_length()) * kv_heads * dim * dtype.itemsize,
        flops=0,
    )


def gated_norm_case(model: str, mixer: Mixer, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the gated norm behind a Mamba-2 layer."""
    channels = mixer.heads * mixer.headdim

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        return {"x": draw(batch, n, channels), "gate": draw(batch, n, channels), "weight": draw(channels)}

    def norm(backend: Backend) -> Provider:
        return lambda i: ops.gated_rms_norm(
            i["x"], i["gate"], i["weight"], eps=1e-5, groups=mixer.groups, backend=backend
        )

    return Case(
        "gated_rms_norm",
        {"model": model, "batch": batch, "n": n},
        make,
        both(norm),
        num_bytes=3 * batch * n * channels * dtype.itemsize,
        flops=0,
        terms=channels // mixer.groups,
    )


def stream_norm_case(
    model: str, mixer: Mixer, batch: int, n: int, dtype: torch.dtype, device: torch.device, *, adds: bool
) -> Case:
    """Time the norm of rows, or of a residual sum, as wide as half the layer: the stream of models of these sizes."""
    channels = mixer.heads * mixer.headdim // 2

    def make(generator: torch.Generator) -> Inputs:
        draw = draws(generator, dtype)
        names = ("x", "stream") if adds else ("x",)
        return {**{name: draw(batch, n, channels) for name in names}, "weight": draw(channels)}

    def norm(backend: Backend) -> Provider:
        if adds:
            return lambda i: ops.rms_norm_add(i["x"], i["stream"], i["weight"], eps=1e-5, backend=backend)[0]
        return lambda i: ops.rms_norm(i["x"], i["weight"], eps=1e-5, backend=backend)

    return Case(
        "rms_norm_add" if adds else "rms_norm",
        {"model": model, "batch": batch, "n": n},
        make,
        both(norm),
        num_bytes=(4 if adds else 2) * batch * n * channels * dtype.itemsize,
        flops=0,
        terms=channels,
    )


def accept_case(model: str, vocab: int, batch: int, n: int, dtype: torch.dtype, device: torch.device) -> Case:
    """Time the draw of the target's tokens and the walk down the tree; the draws of every backend are the same."""
    tree = tree_inputs(batch, n, device, None)
    tokens = torch.zeros(batch, n, dtype=torch.int64, device=device)
    words = torch.arange(batch, device=device)

    def make(generator: torch.Generator) -> Inputs:
        law = torch.rand(batch, n, vocab, generator=generator, device=device)
        law[..., 0] += vocab / 2  # half of the draws are token 0, which every node carries
        return tree | {"law": law / law.sum(-1, keepdim=True)}

    def walk(backend: Backend) -> Provider:
        def run(i: Inputs) -> Tensor:
            law = i["law"].float()  # the reference's float64 copy holds the same numbers
            found = accept_door.match_accept(
                tokens, i["topology"], law, seed=1, sequences=words, positions=words, backend=backend
            )
            return torch.cat((found.path, found.next_token[:, None]), 1)

        return run

    return Case(
        "match_accept",
        {"model": model, "batch": batch, "n": n},
        make,
        both(walk),
        num_bytes=4 * batch * n * vocab,
        flops=0,
    )
