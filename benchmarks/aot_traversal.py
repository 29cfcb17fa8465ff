"""The builds of traversal verification at the vocabularies of published models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from aot_attention import Launch
from aot_build import Build

from stree.kernels import traversal_ends_kernels as ends
from stree.kernels import traversal_kernels as code
from stree.kernels.reference_accept import TARGET
from stree.kernels.tiles import padded
from stree.kernels.traversal import ACCEPT, constants, warps

VOCABULARIES = {"vocabulary of 50288": 50288, "vocabulary of 151936": 151936}
POINTERS = {
    **dict.fromkeys(("law_ptr", "probs_ptr", "state_ptr", "parts_ptr", "coin_ptr", "ratio_ptr"), "*fp32"),
    **dict.fromkeys(("tokens_ptr", "sequences_ptr", "positions_ptr", "key_ptr", "next_ptr"), "*i64"),
    **dict.fromkeys(("parents_ptr", "depths_ptr", "row_ptr", "plan_ptr"), "*i32"),
    **dict.fromkeys(("path_ptr", "lengths_ptr", "leaf_ptr"), "*i32"),
    "mask_ptr": "*i1",
    "kind_ptr": "*i8",
}
OWN = {"PURPOSE": ACCEPT, "DELTA": 1, "INDEPENDENT": 2}


def _builder(kernel: Any, *, owns: str = "block", sums: str = "*fp64", **own: int) -> Callable[..., Build]:
    """Describe the launches of a kernel; laws are float32 whatever the dtype of a model."""

    def build(vocab: int, n: int, dtype: torch.dtype) -> Build:
        known = {**constants(n, vocab), **OWN, **own}
        names = kernel.arg_names
        taken = {name: known[name] for name in names if name in known}
        pointers = {name: kind for name, kind in {**POINTERS, "sums_ptr": sums}.items() if name in names}
        integers = {name: 1 for name in names if name not in taken and name not in pointers}
        return Build(kernel, taken, pointers, integers, Launch(padded(n), warps(padded(n))[owns]))

    return build


BUILDERS: dict[str, tuple[Callable[[Any, int, torch.dtype], Build], Mapping[str, Any]]] = {
    "traversal_sums": (_builder(ends.sums_kernel), VOCABULARIES),
    "traversal_plan": (_builder(ends.plan_kernel, owns="pairs"), VOCABULARIES),
    "traversal_settle": (_builder(code.settle_kernel, owns="nodes"), VOCABULARIES),
    "traversal_reject": (_builder(code.reject_kernel), VOCABULARIES),
    "traversal_rest": (_builder(code.rest_kernel, owns="rest"), VOCABULARIES),
    "traversal_toss": (_builder(ends.toss_kernel, owns="pairs"), VOCABULARIES),
    "traversal_leaf": (_builder(ends.leaf_kernel, sums="*i64"), VOCABULARIES),
    "traversal_next": (_builder(ends.next_kernel, sums="*i64", PURPOSE=TARGET), VOCABULARIES),
}
