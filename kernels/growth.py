"""One layer of growth in Triton: a launch for each function of `stree.kernels.growth_door`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.growth_kernels import choose_kernel, rank_kernel, table_kernel
from stree.kernels.reference_growth import Level, Memory, RankFit, Ratings, Siblings, Table, Terms, Words
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
            **constants, num_warps=choose_warps(constants["SLOTS"], constants["WIDTH"]),
        )  # fmt: skip
    return slots, is_taken


def choose_constants(slots: int, width: int) -> dict[str, Any]:
    """List the compile-time constants of a choice; ahead-of-time builds take theirs from here too."""
    return {"SLOTS": padded(slots), "WIDTH": padded(width), "STEPS": BELOW_STEPS}


def choose_warps(slots: int, width: int) -> int:
    """Choose warps by padded sizes, so that pairs of 128 taken slots do not spill; one warp waits for no other."""
    return 16 if width > 64 else 1 if slots <= 32 else 4


def rate_by_rank(fit: RankFit, level: Level, memory: Memory, given: Siblings) -> Tensor:
    """Rate children known beforehand; see `stree.kernels.growth_door`."""
    reach, probs, norms = _probs(given)
    batch, above, ranks = probs.shape
    said, strides = _said(given.words)
    value = torch.empty_like(probs)
    with torch.cuda.device_of(probs):
        rank_kernel[(-(-above // NODES), batch)](
            reach, probs, norms, fit.level, fit.by_confidence, fit.by_sharpness, fit.by_text, level.shift,
            memory.places, memory.last, *said, value, above, ranks, len(fit.level), reach.stride(0), *strides,
            NODES=NODES, NUM_PLACES=memory.num_places, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return value


def rate_by_table(table: Table, given: Siblings) -> Ratings:
    """Rate drawn children; see `stree.kernels.growth_door`."""
    reach, probs, norms = _probs(given)
    batch, above, ranks = probs.shape
    ratings = Ratings(
        torch.empty_like(probs), torch.empty_like(probs), probs.new_empty(*probs.shape, 2, dtype=torch.int64)
    )
    with torch.cuda.device_of(probs):
        table_kernel[(-(-above // NODES), batch)](
            reach, probs, norms, table.passed, table.tests, table.sharpness, table.confidence, *ratings,
            above, ranks, len(table.rank), table.tests.shape[1], reach.stride(0),
            SHARPNESS=len(table.sharpness), CONFIDENCE=len(table.confidence), NODES=NODES, num_warps=1,
            enable_fp_fusion=False,  # sums and products round as torch's do
        )  # fmt: skip
    return ratings


def _probs(given: Siblings) -> tuple[Tensor, Tensor, Tensor]:
    """Give values of the nodes, probabilities of their children and norms, as kernels read them."""
    reach = given.reach if given.reach.stride(1) == 1 else given.reach.contiguous()
    return reach, given.probs.contiguous(), given.norms.contiguous()


def _said(words: Words | None) -> tuple[list[Tensor | None], list[int]]:
    """Give tokens of children and columns, parents, lead; first column, strides of tokens and parents."""
    if words is None:
        return [None] * 4, [0, 0, 0]
    tokens, parents = words.tokens, words.parents
    strides = [words.first, tokens.stride(0), parents.stride(0)]
    return [words.children.contiguous(), tokens, parents, words.lead], strides
