"""One layer of growth in Triton: a launch for each function of `stree.kernels.growth_door`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.growth_kernels import choose_kernel, rank_kernel, table_kernel
from stree.kernels.reference_growth import NUM_SAID, Level, Memory, RankFit, Ratings, Table, Terms, Words
from stree.kernels.tiles import padded

__all__ = ["choose", "choose_constants", "rate_by_rank", "rate_by_table"]

NODES = 32  # whose children a program of one warp rates, a lane a node
BELOW_STEPS = 8  # halvings of a list of up to 255 values


def choose(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose the best slots; see `stree.kernels.growth_door`."""
    value = value if value.stride(1) == 1 else value.contiguous()
    batch, count = value.shape
    width = min(terms.width, count)
    slots = value.new_empty(batch, width, dtype=torch.int64)
    is_taken = value.new_empty(batch, width, dtype=torch.bool)
    constants = choose_constants(count, width)
    with torch.cuda.device_of(value):  # Triton launches on the current device, wherever the tensors are
        choose_kernel[(batch,)](
            value, None if left is None else left.contiguous(), below, slots, is_taken,
            count, width, 0 if below is None else len(below), terms.threshold, terms.layers_left, value.stride(0),
            **constants, IN_ORDER=terms.in_order, num_warps=choose_warps(constants["SLOTS"], constants["WIDTH"]),
        )  # fmt: skip
    return slots, is_taken


def choose_constants(slots: int, width: int) -> dict[str, Any]:
    """List the compile-time constants of a choice; ahead-of-time builds take theirs from here too."""
    return {"SLOTS": padded(slots), "WIDTH": padded(width), "STEPS": BELOW_STEPS}


def choose_warps(slots: int, width: int) -> int:
    """Choose warps by padded sizes, so that pairs of 128 taken slots do not spill; one warp waits for no other."""
    return 16 if width > 64 else 1 if slots <= 32 else 4


def rate_by_rank(
    fit: RankFit, level: Level, memory: Memory, words: Words | None, reach: Tensor, probs: Tensor, norms: Tensor
) -> Tensor:
    """Rate children known beforehand; see `stree.kernels.growth_door`."""
    probs = probs.contiguous()
    batch, above, ranks = probs.shape
    reach = reach if reach.stride(1) == 1 else reach.contiguous()
    value = torch.empty_like(probs)
    said, places = _operands(words)
    with torch.cuda.device_of(probs):
        rank_kernel[(-(-above // NODES), batch)](
            reach, probs, norms.contiguous(), fit.level, fit.by_confidence, fit.by_sharpness, fit.by_text, level.shift,
            memory.places, memory.last, *said, value, above, ranks, len(fit.level), reach.stride(0),
            *places, NODES=NODES, NUM_PLACES=memory.num_places, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return value


def _operands(words: Words | None) -> tuple[list[Tensor | None], list[int]]:
    """List what a kernel reads of words: children, tokens, parents and lead; the first column and two strides."""
    if words is None:
        return [None] * 4, [0] * 3
    tokens, parents = words.tokens, words.parents
    tensors = [words.children.contiguous(), tokens, parents, words.lead]
    return tensors, [words.first, tokens.stride(0), parents.stride(0)]


def rate_by_table(
    table: Table,
    memory: Memory,
    words: Words | None,
    reach: Tensor,
    probs: Tensor,
    norms: Tensor,
    is_chosen: Tensor | None,
) -> Ratings:
    """Rate drawn children; see `stree.kernels.growth_door`."""
    probs = probs.contiguous()
    batch, above, ranks = probs.shape
    reach = reach if reach.stride(1) == 1 else reach.contiguous()
    ratings = Ratings(
        torch.empty_like(probs), torch.empty_like(probs), probs.new_empty(*probs.shape, 2, dtype=torch.int64)
    )
    said, places = _operands(words)
    with torch.cuda.device_of(probs):
        table_kernel[(-(-above // NODES), batch)](
            reach, probs, norms.contiguous(), None if is_chosen is None else is_chosen.contiguous(),
            table.passed, table.tests, table.sharpness, table.confidence, memory.places, memory.last, *said, *ratings,
            above, ranks, len(table.rank), table.tests.shape[1], reach.stride(0), *places,
            SHARPNESS=len(table.sharpness), CONFIDENCE=len(table.confidence), SAID=NUM_SAID, NODES=NODES,
            NUM_PLACES=memory.num_places, num_warps=1, enable_fp_fusion=False,  # sums and products round as torch's do
        )  # fmt: skip
    return ratings
