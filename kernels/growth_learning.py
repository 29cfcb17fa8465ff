"""The front door to what estimates learn from a verified tree: a table of acceptances, or a text's level and memory.

On a GPU a level is one launch, a table one behind another that puts together what the layers left; elsewhere, in
float64 and beyond MAX_NODES nodes it is `stree.kernels.reference_growth`, which is the specification; on the CPU texts
are read by compiled code.  For a table nodes are found by their numbers, so that nothing is gathered before: a layer
leaves its slots and the cells of all of them, and one list of places, made once for each plan, says where in a row of
both a node's are.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stree.kernels import reference_growth
from stree.kernels.reference_growth import Kept, Level, Memory, Table, Verdicts
from stree.kernels.tiles import MAX_NODES, padded
from stree.kernels.topology import is_launched, reads_freely

__all__ = [
    "Kept",
    "Level",
    "Memory",
    "Table",
    "Verdicts",
    "learn",
    "learn_constants",
    "learn_level",
    "learn_warps",
    "remember",
]


def learn(table: Table, kept: Sequence[Kept], verdicts: Verdicts) -> None:
    """Count every test of a tree by the probability that it is made: its ancestors accepted, its elder siblings not.

    Sums are formed in one order, so what a table holds does not depend on the run.

    Args:
        table: ``tests`` and ``passed`` are added to, at the cells of each node that is no padding.
        kept: what became nodes, layer by layer; they are numbered from 1.
        verdicts: on the tree that was verified.
    """
    ratios = verdicts.ratios
    if is_launched(ratios) and ratios.dtype == torch.float32 and verdicts.parents.shape[1] <= MAX_NODES:
        _learn_in_one(table, kept, verdicts)
    else:
        reference_growth.learn(table, kept, verdicts)


def _learn_in_one(table: Table, kept: Sequence[Kept], verdicts: Verdicts) -> None:
    """Do the same in a launch behind another."""
    from stree.kernels.growth_learning_kernels import learn_kernel  # imports triton

    batch, n = verdicts.parents.shape
    notes = torch.cat([part for cells, slots in kept for part in (slots, cells.flatten(1))], 1)
    places = _places(tuple((slots.shape[1], cells[0].numel()) for cells, slots in kept), notes.device)
    numbers, ratios = verdicts.numbers, verdicts.ratios
    ratios = ratios if ratios.stride(1) == 1 else ratios.contiguous()
    constants = learn_constants(n)
    with torch.cuda.device_of(notes):  # Triton launches on the current device, wherever the tensors are
        learn_kernel[(batch,)](
            notes, places, None if numbers is None else numbers.contiguous(), verdicts.parents.contiguous(),
            verdicts.mask.contiguous(), ratios, verdicts.is_live, table.passed, table.tests,
            n, notes.shape[1], places.shape[1], table.tests.shape[1], ratios.stride(0),
            **constants, num_warps=learn_warps(constants["NODES"]),
        )  # fmt: skip


def learn_level(level: Level, values: Tensor, verdicts: Verdicts) -> None:
    """Learn how much surer a text is than a fit, from the likeliest children of the nodes that were accepted.

    Each was right or it was not, which was expected with a chance.  The level goes a Newton step towards what makes all
    of the text's so far the likeliest, beside the weight that it began with.

    Args:
        level: changed in place.
        values: float[batch, n], of the tree's nodes, products of chances from the root on.
        verdicts: on it; ``numbers`` are not read.  Of siblings the likeliest is first.
    """
    if is_launched(values) and values.dtype == torch.float32 and values.shape[1] <= MAX_NODES:
        _learn_level_in_one(level, values, verdicts)
    else:
        reference_growth.learn_level(level, values, verdicts)


def _learn_level_in_one(level: Level, values: Tensor, verdicts: Verdicts) -> None:
    """Do the same in one launch."""
    from stree.kernels.growth_learning_kernels import level_kernel  # imports triton

    batch, n = values.shape
    ratios = verdicts.ratios if verdicts.ratios.stride(1) == 1 else verdicts.ratios.contiguous()
    constants = learn_constants(n)
    with torch.cuda.device_of(values):
        level_kernel[(batch,)](
            verdicts.parents.contiguous(), verdicts.mask.contiguous(), values.contiguous(), ratios, verdicts.is_live,
            level.shift, level.weight, n, ratios.stride(0), **constants, num_warps=learn_warps(constants["NODES"]),
        )  # fmt: skip


def remember(memory: Memory, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
    """Read how the texts go on.

    Args:
        memory: written to.
        tokens: int64[batch, n], of a tree, or of the texts themselves.
        path: int32[batch, m], nodes from the root down, whose tokens are read; None: all tokens, in their order.
        lengths: int32[batch], how many of them; 0 where a text does not go on.
    """
    if path is not None and is_launched(tokens):
        _remember_in_one(memory, tokens, path, lengths)
    elif reads_freely(tokens):
        from stree.kernels import ratings_compiled  # imports numba

        ratings_compiled.remember(memory, tokens, path, lengths)
    else:
        reference_growth.remember(memory, tokens, path, lengths)


def _remember_in_one(memory: Memory, tokens: Tensor, path: Tensor, lengths: Tensor) -> None:
    """Do the same in one launch."""
    from stree.kernels.growth_learning_kernels import remember_kernel  # imports triton

    tokens, path = (part if part.stride(1) == 1 else part.contiguous() for part in (tokens, path))
    batch, m = path.shape
    with torch.cuda.device_of(tokens):
        remember_kernel[(batch,)](
            tokens, path, lengths.contiguous(), memory.places, memory.last, m, tokens.stride(0), path.stride(0),
            ENTRIES=padded(m), NUM_PLACES=memory.num_places, num_warps=1,
        )  # fmt: skip


def learn_constants(n: int) -> dict[str, Any]:
    """List the compile-time constants for trees of ``n`` nodes; ahead-of-time builds take theirs from here too."""
    return {"NODES": padded(n)}


def learn_warps(nodes: int) -> int:
    """Choose warps by padded nodes, so that a thread holds 16 pairs of them, above 16 nodes."""
    return max(1, nodes * nodes // 512)


@cache  # captured steps read them: none may be dropped
def _places(sizes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """List for each node, layer by layer, where its slot is in a row of notes, and where its layer's cells begin.

    Args:
        sizes: nodes of each layer, and numbers in the cells of all its slots.
        device: of the notes.

    Returns:
        int64[2, nodes].
    """
    found: list[tuple[int, int]] = []
    begin = 0
    for nodes, cells in sizes:
        found += [(begin + node, begin + nodes) for node in range(nodes)]
        begin += nodes + cells
    return torch.tensor(found, dtype=torch.int64, device=device).view(-1, 2).T.contiguous()
