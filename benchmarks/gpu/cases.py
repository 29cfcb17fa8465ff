"""What the GPU suite times: every operation at the shapes of published models, and at tiny ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import shapes
from benchmarks.gpu.case import PATH, Case, Draw, Inputs, Size
from benchmarks.gpu.recurrences import conv_case, delta_case, diagonal_case, selective_case, ssd_case
from benchmarks.shapes import Attention, Delta, Experts, FeedForward, Mixer
from stree.kernels import ops
from stree.kernels.attention.kernel import split_context
from stree.kernels.dispatch import Backend
from stree.kernels.tiles import AttentionTile


def attention_case(sizes: Attention, at: Size) -> Case:
    """Tree attention over a context; values of latent attention are the first columns of the keys."""
    tree, (b, n, size) = at.tree(), (at.batch, at.n, at.dtype.itemsize)
    heads, kv_heads, dim, value_dim = sizes.heads, sizes.kv_heads, sizes.headdim, sizes.value_dim
    context = sizes.context

    def make(draw: Draw, _: Draw) -> Inputs:
        keys = {"k_cache": (b, kv_heads, context, dim), "k_stash": (b, n, kv_heads, dim), "k": (b, n, kv_heads, dim)}
        found = {name: draw(*shape) for name, shape in keys.items()}
        if not sizes.latent:
            found |= {"v" + name[1:]: draw(*shape) for name, shape in keys.items()}
        lengths = torch.full((b,), context - 1, dtype=torch.int32, device=at.device)
        return tree | found | {"lengths": lengths, "q": draw(b, n, heads, dim)}

    def run(i: Inputs, backend: Backend) -> Tensor:
        v_cache, v_stash, v = (
            i["k" + name][..., : sizes.latent] if sizes.latent else i["v" + name] for name in ("_cache", "_stash", "")
        )
        return ops.attention_step(
            i["k_cache"], v_cache, i["lengths"], i["k_stash"], v_stash, None, None, i["q"], i["k"], v, i["topology"],
            scale=dim**-0.5, backend=backend,
        )  # fmt: skip

    tile = AttentionTile.of(n * heads // kv_heads, dim, at.dtype)
    blocks = -(-n * heads // kv_heads // tile.rows)
    columns = dim + (0 if sizes.latent else dim)
    return at.case(
        "attention_step", make, run,
        num_bytes=b * size * (kv_heads * (context + 2 * n) * columns + n * heads * (dim + value_dim)),
        flops=2 * b * heads * n * (context + n) * (dim + value_dim),
        terms=dim + n + split_context(context, blocks * b * kv_heads, tile.keys)[1],
    )  # fmt: skip


def commit_case(sizes: Attention, at: Size) -> Case:
    """The append of a path's keys and values to the cache."""
    tree, (b, n, heads, dim) = at.tree(), (at.batch, at.n, sizes.kv_heads, sizes.headdim)

    def make(draw: Draw, _: Draw) -> Inputs:
        cache, rows = (b, heads, 256, dim), (b, n, heads, dim)
        lengths = torch.full((b,), 200, dtype=torch.int32, device=at.device)
        inputs = {"k_cache": draw(*cache), "v_cache": draw(*cache), "k": draw(*rows), "v": draw(*rows)}
        return tree | inputs | {"lengths": lengths}

    def run(i: Inputs, backend: Backend) -> Tensor:
        new = i["k"], i["v"], i["path"], i["path_lengths"]
        ops.kv_commit(i["k_cache"], i["v_cache"], i["lengths"], *new, backend=backend)
        return i["v_cache"]  # type: ignore[no-any-return]

    return at.case("kv_commit", make, run, 4 * b * min(PATH, n.bit_length()) * heads * dim * at.dtype.itemsize)


def gated_norm_case(sizes: Mixer, at: Size) -> Case:
    """The gated norm behind a Mamba-2 layer."""
    channels, groups = sizes.heads * sizes.headdim, sizes.groups
    shape = (at.batch, at.n, channels)
    return at.case(
        "gated_rms_norm",
        lambda draw, _: {"x": draw(*shape), "gate": draw(*shape), "weight": draw(channels)},
        lambda i, backend: ops.gated_rms_norm(**i, eps=1e-5, groups=groups, backend=backend),
        3 * at.batch * at.n * channels * at.dtype.itemsize,
        terms=channels // groups,
    )


def norm_case(sizes: Mixer, at: Size) -> Case:
    """The norm of rows of half the layer's width, which is the width of the residual stream."""
    channels = sizes.heads * sizes.headdim // 2
    return at.case(
        "rms_norm",
        lambda draw, _: {"x": draw(at.batch, at.n, channels), "weight": draw(channels)},
        lambda i, backend: ops.rms_norm(i["x"], i["weight"], eps=1e-5, backend=backend),
        2 * at.batch * at.n * channels * at.dtype.itemsize,
        terms=channels,
    )


def norm_add_case(sizes: Mixer, at: Size) -> Case:
    """The norm of a residual sum."""
    channels = sizes.heads * sizes.headdim // 2
    shape = (at.batch, at.n, channels)
    return at.case(
        "rms_norm_add",
        lambda draw, _: {"x": draw(*shape), "stream": draw(*shape), "weight": draw(channels)},
        lambda i, backend: ops.rms_norm_add(i["x"], i["stream"], i["weight"], eps=1e-5, backend=backend)[0],
        4 * at.batch * at.n * channels * at.dtype.itemsize,
        terms=channels,
    )


def rotary_case(sizes: Attention, at: Size) -> Case:
    """The rotation of all columns of queries and keys, strided as their projections give them."""
    b, n, dim, heads, kv_heads = at.batch, at.n, sizes.headdim, sizes.heads, sizes.kv_heads

    def make(draw: Draw, _: Draw) -> Inputs:
        q, k = (draw(b, n, count, dim).transpose(1, 2) for count in (heads, kv_heads))
        return {"q": q, "k": k, "cos": draw(b, n, dim), "sin": draw(b, n, dim)}

    def run(i: Inputs, backend: Backend) -> Tensor:
        return ops.rotary(i["q"], i["k"], i["cos"], i["sin"], backend=backend)[0 if heads > kv_heads else 1]

    return at.case("rotary", make, run, 2 * b * n * dim * (heads + kv_heads + 1) * at.dtype.itemsize, terms=2)


def activation_case(sizes: FeedForward, at: Size) -> Case:
    """The activation between the projections of a feed-forward."""
    names = ("gate", "up") if sizes.gated else ("gate",)
    shape = (at.batch, at.n, sizes.channels)
    return at.case(
        "gated_activation",
        lambda draw, _: {name: draw(*shape) for name in names},
        lambda i, backend: ops.gated_activation(i["gate"], i.get("up"), activation=sizes.activation, backend=backend),
        (1 + len(names)) * at.batch * at.n * sizes.channels * at.dtype.itemsize,
        terms=1,
    )


def delta_inputs_case(sizes: Delta, at: Size) -> Case:
    """The inputs of the gated delta rule from their projections; KDA's decays come from elsewhere."""
    b, n, heads, keys = at.batch, at.n, sizes.heads, sizes.key_heads * sizes.key_dim
    decays = 0 if sizes.per_channel else heads

    def make(draw: Draw, _: Draw) -> Inputs:
        rates = {} if sizes.per_channel else {"a": draw(b, n, heads), "A_log": draw(heads), "dt_bias": draw(heads)}
        return {"qk": draw(b, n, 2 * keys), "b": draw(b, n, heads), **rates}

    def run(i: Inputs, backend: Backend) -> Tensor:
        rates = (i.get("a"), i.get("A_log"), i.get("dt_bias"))
        made = ops.delta_inputs(i["qk"], i["b"], *rates, key_heads=sizes.key_heads, backend=backend)
        return torch.cat([part.flatten(2) for part in made if part is not None], -1)

    num_bytes = b * n * (2 * keys + heads + decays) * (at.dtype.itemsize + 4)
    return at.case("delta_inputs", make, run, num_bytes, terms=sizes.key_dim)


def experts_case(sizes: Experts, at: Size) -> Case:
    """A mixture of experts under uniform routing; bytes are those of the experts that it reaches on average."""
    rows, channels, inner = at.batch * at.n, sizes.channels, sizes.inner

    def make(draw: Draw, wide: Draw) -> Inputs:
        return {
            "x": draw(rows, channels), "index": wide(rows, sizes.count).topk(sizes.share).indices,
            "weights": draw(rows, sizes.share), "up": draw(sizes.count, 2 * inner, channels) / channels**0.5,
            "down": draw(sizes.count, channels, inner) / inner**0.5,
        }  # fmt: skip

    def run(i: Inputs, backend: Backend) -> Tensor:
        return ops.experts(i["x"], i["index"], i["weights"], i["up"], i["down"], backend=backend)

    weights = 3 * sizes.count * (1 - (1 - sizes.share / sizes.count) ** rows) * inner * channels
    num_bytes = round((weights + 2 * rows * channels) * at.dtype.itemsize)
    flops = 6 * rows * sizes.share * inner * channels
    return at.case("experts", make, run, num_bytes, flops=flops, terms=channels + inner)


def accept_case(vocab: int, at: Size) -> Case:
    """The draw of the target's tokens and the walk down the tree; all backends draw the same."""
    tree, tokens = at.tree(), torch.zeros(at.batch, at.n, dtype=torch.int64, device=at.device)
    rows = torch.arange(at.batch, device=at.device)

    def make(_: Draw, wide: Draw) -> Inputs:
        probs = wide(at.batch, at.n, vocab).abs()
        probs[..., 0] += 0.8 * vocab  # half of the draws are token 0, which every node carries
        return tree | {"probs": probs / probs.sum(-1, keepdim=True)}

    def run(i: Inputs, backend: Backend) -> Tensor:
        probs = i["probs"].float()  # the reference's float64 copy holds the same numbers
        keys: Inputs = {"seed": 1, "sequences": rows, "positions": rows}
        found = ops.match_accept(tokens, i["topology"], probs, **keys, backend=backend)
        return torch.cat((found.path, found.next_token[:, None]), 1)

    return at.case("match_accept", make, run, 4 * at.batch * at.n * vocab)


Kinds = list[tuple[Callable[[Any, Size], Case], Mapping[str, Any]]]
KINDS: Kinds = [
    (ssd_case, shapes.MIXERS),
    (delta_case, shapes.DELTAS),
    (attention_case, shapes.ATTENTIONS),
    (selective_case, shapes.SELECTIVES),
    (conv_case, shapes.MIXERS),
    (diagonal_case, shapes.DIAGONALS),
    (attention_case, shapes.LATENTS),
    (gated_norm_case, shapes.MIXERS),
    (norm_add_case, shapes.MIXERS),
    (norm_case, shapes.MIXERS),
    (rotary_case, shapes.ATTENTIONS),
    (activation_case, shapes.FEED_FORWARDS),
    (delta_inputs_case, shapes.DELTAS),
    (experts_case, shapes.EXPERTS),
    (commit_case, shapes.ATTENTIONS),
    (accept_case, shapes.VOCABULARIES),
]
SMALL: Kinds = [(make, shapes.tiny(models)) for make, models in KINDS]
OTHER_SIZES = {(1, 1), (1, 16), (1, 32), (1, 64), (16, 16), (16, 32)}


Spec = tuple[Callable[[Any, Size], Case], Any, Size]


def specs(kinds: Kinds, sizes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> Iterator[Spec]:
    """List cases without making them: the first model of every kind at all (batch, nodes), the others at a few sizes.

    A spec (make, model sizes, size) becomes a case by ``make(model sizes, size)``.
    """
    for place in range(max(len(models) for _, models in kinds)):
        for batch, n in sizes:
            for make, models in kinds:
                if place < len(models) and (place == 0 or len(sizes) == 1 or (batch, n) in OTHER_SIZES):
                    model = list(models)[place]
                    yield make, models[model], Size(model, batch, n, dtype, device)


def cases(kinds: Kinds, sizes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Make the cases of `specs`."""
    return (make(models, size) for make, models, size in specs(kinds, sizes, dtype, device))
