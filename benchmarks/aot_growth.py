"""The builds of a layer of growth, for trees of some nodes with some children each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from aot_attention import Launch
from aot_build import Build

from stree.kernels import growth
from stree.kernels.growth_columns import append_constants, begin_constants, cut_constants, select_constants
from stree.kernels.growth_columns_kernels import append_kernel, begin_kernel, cut_kernel, select_kernel
from stree.kernels.growth_kernels import choose_kernel, rank_kernel, table_kernel
from stree.kernels.growth_learning import learn_constants, learn_warps
from stree.kernels.growth_learning_kernels import learn_kernel, level_kernel, remember_kernel
from stree.kernels.reference_growth import NUM_PLACES
from stree.kernels.tiles import padded

RANKS = {"4 children a node": 4, "6 children a node": 6}
POINTERS = {
    **dict.fromkeys(("reach_ptr", "probs_ptr", "norms_ptr", "passed_ptr", "tests_ptr", "rating_ptr"), "*fp32"),
    **dict.fromkeys(("sharpness_ptr", "confidence_ptr", "level_ptr", "priority_ptr", "values_ptr"), "*fp32"),
    **dict.fromkeys(("value_ptr", "below_ptr", "shift_ptr"), "*fp32"),
    **dict.fromkeys(("cells_ptr", "slots_ptr", "left_ptr", "lead_ptr", "offered_ptr", "tokens_ptr"), "*i64"),
    **dict.fromkeys(("above_ptr", "leaf_ptr"), "*i64"),
    **dict.fromkeys(("parents_ptr", "depths_ptr"), "*i32"),
    **dict.fromkeys(("taken_ptr", "mask_ptr"), "*i1"),
}
SAID = {"places_ptr": "*i1", "last_ptr": "*i64", "children_ptr": "*i64"}  # of what texts hold and children say
EDGES = 7  # of sharpness and of confidence


def _build(kernel: Any, constants: dict[str, Any], size: int, warps: int) -> Build:
    """Describe the launch of a kernel; values are float32 whatever the dtype of a model."""
    names = kernel.arg_names
    pointers = {name: kind for name, kind in POINTERS.items() if name in names}
    integers = {name: 1 for name in names if name not in constants and name not in pointers}
    return Build(
        kernel, constants, pointers, {k: v for k, v in integers.items() if k != "threshold"}, Launch(size, warps)
    )


def choose_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the choice of a layer below the widest one."""
    width = max(n - 1, 1)
    constants = growth.choose_constants(width * ranks, width)
    warps = growth.choose_warps(constants["SLOTS"], constants["WIDTH"])
    return _build(choose_kernel, constants, constants["SLOTS"], warps)


def table_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the ratings by a table; any number of nodes takes the same build."""
    constants = {"SHARPNESS": EDGES, "CONFIDENCE": EDGES, "NODES": growth.NODES}
    return _build(table_kernel, constants, growth.NODES, 1)


def rank_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the ratings by rank; any number of nodes takes the same build."""
    build = _build(rank_kernel, {"NODES": growth.NODES, "NUM_PLACES": NUM_PLACES}, growth.NODES, 1)
    return replace(build, pointers=build.pointers | SAID | {"text_ptr": "*fp32"})


def append_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the columns of a pruned tree's layer; any number of nodes takes the same build."""
    return _build(append_kernel, append_constants(prunes=True), 0, 4)


def begin_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the layout of a tree's columns; any number of nodes takes the same build."""
    build = _build(begin_kernel, begin_constants(), 0, 4)
    pointers = build.pointers | {"pending_ptr": "*i64", "flag_ptr": "*i1"}
    return replace(build, pointers=pointers, integers={"room": 1})


def cut_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the cut of a tree out of its columns; any number of nodes takes the same build."""
    pointers = dict.fromkeys(("parent_ptr", "depth_ptr", "row_ptr"), "*i32")
    pointers |= {"kept_ptr": "*i64", "token_ptr": "*i64", "ancestor_ptr": "*i1"}
    build = _build(cut_kernel, cut_constants(), 0, 4)
    return replace(build, pointers=build.pointers | pointers, integers={"count": 1, "room": 1})


def select_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the selection of the best of twice as many nodes."""
    constants = select_constants(2 * n, n, by_value=True)
    build = _build(select_kernel, constants, constants["SLOTS"], 1 if constants["SLOTS"] <= 32 else 4)
    pointers = {"parents_ptr": "*i32", "values_ptr": "*fp32", "kept_ptr": "*i64"}
    return replace(build, pointers=pointers, integers={"n": 1, "count": 1, "room": 1})


def learn_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe what a table learns from a tree of which not all grown nodes were proposed."""
    constants = learn_constants(n)
    build = _build(learn_kernel, constants, constants["NODES"], learn_warps(constants["NODES"]))
    pointers = dict.fromkeys(("notes_ptr", "places_ptr", "numbers_ptr"), "*i64")
    pointers |= {"parents_ptr": "*i32", "mask_ptr": "*i1", "live_ptr": "*i1"}
    pointers |= dict.fromkeys(("ratios_ptr", "passed_ptr", "tests_ptr"), "*fp32")
    integers = [name for name in learn_kernel.arg_names if name not in constants and name not in pointers]
    return replace(build, pointers=pointers, integers=dict.fromkeys(integers, 1))


def level_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe what a text's level learns from a tree."""
    constants = learn_constants(n)
    build = _build(level_kernel, constants, constants["NODES"], learn_warps(constants["NODES"]))
    pointers = {"parents_ptr": "*i32", "mask_ptr": "*i1", "live_ptr": "*i1"}
    pointers |= dict.fromkeys(("values_ptr", "ratios_ptr", "shift_ptr", "weight_ptr"), "*fp32")
    return replace(build, pointers=pointers, integers=dict.fromkeys(("n", "stride_ratios_b"), 1))


def remember_build(ranks: int, n: int, dtype: torch.dtype) -> Build:
    """Describe how a text is read along a path of n nodes."""
    pointers = dict.fromkeys(("tokens_ptr", "last_ptr"), "*i64") | dict.fromkeys(("path_ptr", "lengths_ptr"), "*i32")
    integers = dict.fromkeys(("m", "stride_tokens_b", "stride_path_b"), 1)
    constants = {"ENTRIES": padded(n), "NUM_PLACES": NUM_PLACES}
    return Build(remember_kernel, constants, pointers | {"places_ptr": "*i1"}, integers, Launch(padded(n), 1))


BUILDERS: dict[str, tuple[Callable[[Any, int, torch.dtype], Build], Mapping[str, Any]]] = {
    "growth_choose": (choose_build, RANKS),
    "growth_rate_by_table": (table_build, RANKS),
    "growth_rate_by_rank": (rank_build, RANKS),
    "growth_append": (append_build, RANKS),
    "growth_begin": (begin_build, RANKS),
    "growth_select": (select_build, RANKS),
    "growth_cut": (cut_build, RANKS),
    "growth_learn": (learn_build, RANKS),
    "growth_remember": (remember_build, {"any number of children": 0}),
    "growth_learn_level": (level_build, {"any number of children": 0}),
}
