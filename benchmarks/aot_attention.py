"""The builds of tree attention, of its commit and of acceptance at the shapes of published models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from aot_build import POINTERS, Build
from shapes import ATTENTIONS, VOCABULARIES, Attention

from stree.growth.calibrated import ROOT_RANKS
from stree.kernels.accept import distinct_constants, draw_constants
from stree.kernels.accept_kernels import distinct_kernel, draw_kernel, walk_kernel
from stree.kernels.attention.append import kv_commit_constants, kv_commit_kernel
from stree.kernels.attention.kernel import attention_constants, attention_kernel, merge_constants, merge_kernel
from stree.kernels.tiles import AttentionTile, padded


@dataclass(frozen=True, slots=True)
class Launch:
    """What tells apart the builds of a kernel that has no table of tiles."""

    size: int
    warps: int
    stages: int = 3


def attention_build(layer: Attention, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a step, one sequence, without a path to fold."""
    shared = layer.heads // layer.kv_heads
    tile = AttentionTile.of(n * shared, layer.headdim, dtype)
    constants = attention_constants(
        tile, layer.headdim, layer.value_dim, layer.kv_heads, shared, n,
        window=False, softcap=False, direct=False, keep=True, known=False, shares=layer.latent is not None,
    )  # fmt: skip
    names = ("q_ptr", "k_cache_ptr", "v_cache_ptr", "k_ptr", "v_ptr", "stash_k_ptr", "stash_v_ptr", "out_ptr")
    pointers = dict.fromkeys(names, POINTERS[dtype]) | {"lse_ptr": "*fp32"}
    pointers |= dict.fromkeys(("lengths_ptr", "bits_ptr", "depths_ptr"), "*i32")
    integers = _integers(attention_kernel.arg_names, layer.headdim)
    return Build(attention_kernel, constants, pointers, integers, tile)


def merge_build(layer: Attention, n: int, dtype: torch.dtype) -> Build:
    """Describe the merge of the parts of such a step."""
    constants = merge_constants(layer.kv_heads, layer.heads // layer.kv_heads, layer.value_dim)
    pointers = {"part_ptr": POINTERS[dtype], "lse_ptr": "*fp32", "out_ptr": POINTERS[dtype]}
    return Build(merge_kernel, constants, pointers, {"parts": 1}, Launch(padded(layer.value_dim), 4))


def kv_commit_build(layer: Attention, n: int, dtype: torch.dtype) -> Build:
    """Describe the append of a path; the build is the same for all trees."""
    pointers = dict.fromkeys(("k_cache_ptr", "v_cache_ptr", "k_ptr", "v_ptr"), POINTERS[dtype])
    pointers |= {"lengths_ptr": "*i32", "path_ptr": "*i32", "path_lengths_ptr": "*i32"}
    constants = kv_commit_constants(layer.headdim, layer.value_dim, after=False)
    integers = _integers(kv_commit_kernel.arg_names, layer.headdim) | {"sequences": 1}
    return Build(kv_commit_kernel, constants, pointers, integers, Launch(padded(layer.headdim), 4))


def draw_build(vocab: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the draw of a token at every node by the numbers of the nodes' positions."""
    pointers = {"score_ptr": POINTERS[dtype], "depths_ptr": "*i32"}
    pointers |= dict.fromkeys(("sequences_ptr", "positions_ptr", "key_ptr", "drawn_ptr"), "*i64")
    constants = draw_constants(vocab, greedy=False)
    return Build(draw_kernel, constants, pointers, _integers(draw_kernel.arg_names, vocab), Launch(vocab, 8))


def distinct_build(vocab: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the draws of a root's children without replacement, from laws, which are float32 whatever the model."""
    pointers = {"law_ptr": "*fp32", "uniform_ptr": "*fp64", "tokens_ptr": "*i64", "probs_ptr": "*fp32"}
    pointers |= {"least": "fp32", "favourite": "fp32"}
    integers = _integers(distinct_kernel.arg_names, vocab) | {"rows": 1, "count": 1}
    return Build(distinct_kernel, distinct_constants(vocab, ROOT_RANKS), pointers, integers, Launch(vocab, 8))


def beside_build(vocab: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the same beside a favourite."""
    build = distinct_build(vocab, n, dtype)
    return replace(build, pointers=build.pointers | {"chosen_ptr": "*i1"})


def walk_build(vocab: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the walk down a tree; no vocabulary and no dtype reaches it."""
    pointers = dict.fromkeys(("tokens_ptr", "drawn_ptr", "next_ptr"), "*i64") | {"mask_ptr": "*i1"}
    pointers |= dict.fromkeys(("parents_ptr", "depths_ptr", "path_ptr", "lengths_ptr"), "*i32")
    integers = _integers(walk_kernel.arg_names, vocab)
    return Build(walk_kernel, {"NODES": padded(n)}, pointers, integers, Launch(padded(n), 4))


def _integers(names: list[str], stride: int) -> dict[str, int]:
    """Give strides the divisors of a row, and 1 to the integers for which Triton makes no builds of their own."""
    plain = ("n", "first", "new_from", "context", "chunk", "window", "limit", "path_size", "vocab", "width")
    return {
        name: stride if name.startswith("stride_") else 1
        for name in names
        if name.startswith("stride_") or name in plain
    }


BUILDERS: dict[str, tuple[Callable[[Any, int, torch.dtype], Build], Mapping[str, Any]]] = {
    "attention_step": (attention_build, ATTENTIONS),
    "attention_merge": (merge_build, ATTENTIONS),
    "kv_commit": (kv_commit_build, ATTENTIONS),
    "accept_draw": (draw_build, VOCABULARIES),
    "accept_distinct": (distinct_build, VOCABULARIES),
    "accept_beside": (beside_build, VOCABULARIES),
    "accept_walk": (walk_build, VOCABULARIES),
}
