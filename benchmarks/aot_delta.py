"""The builds of the gated delta operations at the shapes of published models."""

from __future__ import annotations

import torch
from aot_build import POINTERS, Build
from shapes import DELTAS, Delta

from stree.kernels.delta_rule.kernel import gated_delta_constants, gated_delta_kernel
from stree.kernels.tiles import GatedDeltaTile


def gated_delta_build(layer: Delta, n: int, dtype: torch.dtype, path: int = 16) -> Build:
    """Describe the launch of a step that folds a path and scores n nodes."""
    tile = GatedDeltaTile.of(n, path, layer.key_dim, layer.value_dim, layer.per_channel)
    constants = gated_delta_constants(
        tile, layer.key_dim, layer.value_dim, layer.heads // layer.key_heads, n, channels=layer.per_channel,
        fold=True, scan=True, keep=True, stashed=False, known=False, aligned=layer.per_channel,
    )  # fmt: skip
    rows = POINTERS[dtype]
    # As the models call it: q and k come from a normalisation in float32, and u is stashed in float32.
    pointers = dict.fromkeys(("v_ptr", "beta_ptr", "o_ptr", "stash_k_ptr", "old_k_ptr"), rows)
    pointers |= dict.fromkeys(("q_ptr", "k_ptr", "u_ptr", "old_u_ptr", "known_ptr"), "*fp32")
    pointers |= dict.fromkeys(("state_ptr", "g_ptr", "old_g_ptr", "stash_g_ptr"), "*fp32")
    pointers |= {"bits_ptr": "*i32", "path_ptr": "*i64", "lengths_ptr": "*i64"}
    width = layer.heads * layer.value_dim
    integers = dict.fromkeys((name for name in gated_delta_kernel.arg_names if name.startswith("stride_")), width)
    integers |= {"n": n, "first": 0, "new_from": 0, "known": 0, "path_size": path, "nheads": layer.heads}
    return Build(gated_delta_kernel, constants, pointers, integers, tile)


BUILDERS = {"gated_delta_step": (gated_delta_build, DELTAS)}
