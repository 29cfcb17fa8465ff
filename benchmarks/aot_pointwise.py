"""The builds of what lean layers run, and of what layers share of a tree, at the shapes of published models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from aot_build import POINTERS, Build
from shapes import ATTENTIONS, DELTAS, EXPERTS, FEED_FORWARDS, Attention, Delta, Experts, FeedForward

from stree.kernels.bookkeeping_kernels import columns_kernel, emit_kernel, nodes_kernel
from stree.kernels.fused.experts import experts_down_kernel, experts_sum_kernel, experts_up_kernel
from stree.kernels.fused.pointwise import delta_inputs_kernel, gated_activation_kernel, rotary_kernel
from stree.kernels.step.indices import ENTRIES, ROWS, path_kernel, tree_kernel
from stree.kernels.tiles import DeltaInputsTile, ExpertsTile, PointwiseTile, RotaryTile, padded


@dataclass(frozen=True, slots=True)
class Rotary:
    """An attention layer whose heads are rotated in their first columns: as many as ``width`` says."""

    sizes: Attention
    width: int


ROTARIES = {
    "Bamba-9B": Rotary(ATTENTIONS["Bamba-9B"], 64),
    "Granite-4.0-H-tiny": Rotary(ATTENTIONS["Granite-4.0-H-tiny"], 128),
    "Qwen3-Next-80B": Rotary(ATTENTIONS["Qwen3-Next-80B"], 64),
    "Falcon-H1-7B": Rotary(ATTENTIONS["Falcon-H1-7B"], 128),
    "Zamba2-7B": Rotary(ATTENTIONS["Zamba2-7B"], 224),
}


def rotary_build(rotary: Rotary, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a rotation; any number of nodes takes the same build."""
    sizes, width = rotary.sizes, rotary.width
    tile = RotaryTile.of(max(sizes.heads, sizes.kv_heads), sizes.headdim)
    constants = {
        "DIM": sizes.headdim, "ROTARY": width, "BLOCK_H": tile.heads, "BLOCK_D": tile.dim,
        "QUERIES": -(-sizes.heads // tile.heads),
    }  # fmt: skip
    names = ("q_ptr", "k_ptr", "cos_ptr", "sin_ptr", "q_out_ptr", "k_out_ptr")
    rows = {"stride_q_n": sizes.heads * sizes.headdim, "stride_k_n": sizes.kv_heads * sizes.headdim}
    heads = dict.fromkeys(("stride_q_h", "stride_k_h"), sizes.headdim)
    tables = dict.fromkeys(("stride_cos_b", "stride_cos_n", "stride_sin_b", "stride_sin_n"), width)
    counts = {"n": 1, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "stride_q_b": 1, "stride_k_b": 1}
    return Build(rotary_kernel, constants, dict.fromkeys(names, POINTERS[dtype]), rows | heads | tables | counts, tile)


def activation_build(sizes: FeedForward, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of a gated activation; any number of nodes takes the same build."""
    tile = PointwiseTile()
    names = ("gate_ptr", "y_ptr", *(("up_ptr",) if sizes.gated else ()))
    strides = dict.fromkeys(("channels", "stride_gate_row", "stride_up_row"), sizes.channels)
    constants = {"KIND": sizes.activation, "BLOCK": tile.channels}
    return Build(gated_activation_kernel, constants, dict.fromkeys(names, POINTERS[dtype]), strides, tile)


def delta_inputs_build(sizes: Delta, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that makes what a delta rule takes; KDA's decays come from elsewhere."""
    tile = DeltaInputsTile.of(sizes.key_heads, sizes.key_dim, sizes.heads)
    constants = {
        "KEY_HEADS": sizes.key_heads, "HEADS": sizes.heads, "DK": sizes.key_dim, "BLOCK_HK": tile.heads,
        "BLOCK_DK": tile.dim, "BLOCK_HV": tile.values,
    }  # fmt: skip
    given = ("qk_ptr", "b_ptr", *(() if sizes.per_channel else ("a_ptr", "A_log_ptr", "bias_ptr")))
    made = ("q_ptr", "k_ptr", "beta_ptr", *(() if sizes.per_channel else ("g_ptr",)))
    pointers = dict.fromkeys(given, POINTERS[dtype]) | dict.fromkeys(made, POINTERS[torch.float32])
    names = ("n", "stride_qk_b", "stride_qk_n", "stride_a_b", "stride_a_n", "stride_b_b", "stride_b_n")
    return Build(delta_inputs_kernel, constants, pointers, dict.fromkeys(names, 2 * sizes.heads), tile)


def tree_build(width: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that derives what layers share of a tree; any number of nodes takes the same build."""
    pointers = {
        "parents_ptr": "*i32", "mask_ptr": "*i1", "hidden_ptr": "*i1", "path_sum_ptr": "*fp64", "bits_ptr": "*i32",
        "index_ptr": "*i64",
    }  # fmt: skip
    integers = dict.fromkeys(("n", "words", "stride_parents_b", "stride_mask_b", "stride_mask_n"), n)
    return Build(tree_kernel, {"WIDTH": width, "ROWS": ROWS}, pointers, integers, Launch())


def path_build(width: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that derives what layers share of an accepted path; any length takes the same build."""
    wide = ("batch_ptr", "rows_ptr", "lengths_ptr", "from_ptr", "entering_ptr", "path_ptr")
    pointers = dict.fromkeys(wide, "*i64") | dict.fromkeys(("beyond_ptr", "keeps_ptr"), "*i1") | {"given_ptr": "*i32"}
    integers = dict.fromkeys(("m", "stride_path_b", "stride_path_m", "stride_lengths"), n)
    constants = {"HISTORY": width - 1, "COLUMNS": padded(width - 1, 1), "BLOCK": ENTRIES}
    return Build(path_kernel, constants, pointers, integers, Launch())


def emit_build(_: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that writes down what a step emits; n is the length of the paths."""
    names = ("tokens_ptr", "next_ptr", "stop_ptr", "limit_ptr", "num_new_ptr", "pending_ptr", "report_ptr")
    pointers = dict.fromkeys(names, "*i64") | dict.fromkeys(("path_ptr", "lengths_ptr"), "*i32")
    integers = dict.fromkeys(("m", "num_stop", "stride_t", "stride_p"), n)
    return Build(emit_kernel, {"PLACES": padded(n)}, pointers | {"finished_ptr": "*i8"}, integers, Launch())


def columns_build(_: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that writes an accepted path down as columns; n is its length."""
    pointers = dict.fromkeys(("path_ptr", "lengths_ptr", "full_ptr", "count_ptr"), "*i32")
    pointers |= dict.fromkeys(("order_ptr", "tokens_ptr", "leaf_ptr"), "*i64") | {"has_leaf_ptr": "*i8"}
    integers = dict.fromkeys(("m", "num_run", "stride_t", "stride_p", "stride_o"), n)
    return Build(columns_kernel, {"PLACES": padded(n + 1)}, pointers, integers, Launch())


def nodes_build(_: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that marks the nodes of an accepted path, in a tree that is a chain."""
    pointers = dict.fromkeys(("path_ptr", "lengths_ptr"), "*i32") | {"on_ptr": "*fp32", "live_ptr": "*i1"}
    constants = {"NODES": padded(n), "PLACES": padded(n)}
    return Build(nodes_kernel, constants, pointers, dict.fromkeys(("m", "n", "stride_p"), n), Launch())


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel without a tile is launched."""

    warps: int = 1
    stages: int = 1


def experts_up_build(sizes: Experts, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of the first products of experts; any number of nodes takes the same build."""
    constants = {"SHARE": sizes.share, "GATED": True, "KIND": "silu"}
    pointers = dict.fromkeys(("x_ptr", "up_ptr", "hidden_ptr"), POINTERS[dtype])
    return _experts_build(experts_up_kernel, sizes, dtype, constants, pointers)


def experts_down_build(sizes: Experts, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of the second products; any number of nodes takes the same build."""
    pointers = dict.fromkeys(("hidden_ptr", "weights_ptr", "down_ptr"), POINTERS[dtype]) | {"out_ptr": "*fp32"}
    return _experts_build(experts_down_kernel, sizes, dtype, {}, pointers)


def _experts_build(kernel: Any, sizes: Experts, dtype: torch.dtype, constants: Any, pointers: dict[str, str]) -> Build:
    """Describe a launch of a mixture of experts."""
    tile = ExpertsTile.of(dtype)
    constants = constants | {
        "CHANNELS": sizes.channels, "INNER": sizes.inner, "ROWS": tile.rows, "BLOCK": tile.block, "DEPTH": tile.depth,
        "CHUNK": tile.chunk, "WIDE": False,
    }  # fmt: skip
    integers = {"pairs": sizes.share, "stride_x_row": sizes.channels}
    return Build(kernel, constants, pointers | {"index_ptr": "*i64"}, integers, tile)


def experts_sum_build(sizes: Experts, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch that adds up what a row's experts gave."""
    tile = PointwiseTile()
    constants = {"SHARE": sizes.share, "CHANNELS": sizes.channels, "BLOCK": tile.channels}
    return Build(experts_sum_kernel, constants, {"parts_ptr": "*fp32", "y_ptr": POINTERS[dtype]}, {}, tile)


WIDTHS = {"convolutions of 4 taps": 4}
BUILDERS: dict[str, tuple[Callable[[Any, int, torch.dtype], Build], Mapping[str, Any]]] = {
    "rotary": (rotary_build, ROTARIES),
    "gated_activation": (activation_build, FEED_FORWARDS),
    "delta_inputs": (delta_inputs_build, DELTAS),
    "experts_up": (experts_up_build, EXPERTS),
    "experts_down": (experts_down_build, EXPERTS),
    "experts_sum": (experts_sum_build, EXPERTS),
    "tree_indices": (tree_build, WIDTHS),
    "path_indices": (path_build, WIDTHS),
    "emit": (emit_build, {"any model": 0}),
    "path_on_columns": (columns_build, {"any model": 0}),
    "path_on_nodes": (nodes_build, {"any model": 0}),
}
