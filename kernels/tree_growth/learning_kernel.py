"""What acceptance models learn from a verified tree, in Triton: one launch for each operation, but for lists."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.constants import constant
from stree.kernels.jit import jit
from stree.kernels.tiles import padded
from stree.kernels.tree_growth.operands import Kept, Level, Memory, Table, Verdicts
from stree.kernels.tree_growth.slots_kernel import pair_number, place_of

__all__ = ["learn", "learn_level", "learn_warps", "remember"]


@triton.jit
def _judged(parents_ptr, ratios_ptr, live_ptr, n, NODES: tl.constexpr):
    """Load a sequence's parents and ratios, 1 where nothing was tested, and mark the nodes that count."""
    node = tl.arange(0, NODES)
    parent = tl.load(parents_ptr + node, node < n, -1)
    is_drafted = parent >= 0
    ratio = tl.load(ratios_ptr + node, is_drafted, 1.0)
    return parent, ratio, is_drafted & (tl.load(live_ptr + node * 0, is_drafted, 0) != 0)


@triton.jit
def _sum_above(mask_ptr, number, n, NODES: tl.constexpr):
    """Add up the numbers of each node's ancestors, its own left out."""
    node = tl.arange(0, NODES)
    strict = (node < n)[:, None] & (node < n)[None, :] & (node[:, None] != node[None, :])
    is_above = tl.load(mask_ptr + (node[:, None] * n + node[None, :]), strict, 0) != 0
    return tl.sum(tl.where(is_above, number[None, :], 0.0), 1)


@triton.jit
def _add(table_ptr, count, is_same, is_first):
    """Add up what nodes of one cell count; the first of them writes."""
    known = tl.load(table_ptr, is_first, 0.0)
    tl.store(table_ptr, known + tl.sum(tl.where(is_same, count[None, :], 0.0), 1), is_first)


@jit(fuses=False, do_not_specialize=["n", "num_notes", "num_kept", "num_cells", "stride_ratios_b"])
def learn_kernel(
    notes_ptr, places_ptr, numbers_ptr, parents_ptr, mask_ptr, ratios_ptr, live_ptr, passed_ptr, tests_ptr,
    n, num_notes, num_kept, num_cells, stride_ratios_b, NODES: tl.constexpr,
):  # fmt: skip
    """Count the tests of a sequence's tree; grid (batch).  No two lanes write to one cell, and none atomically."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    parent, ratio, counts = _judged(
        parents_ptr + batch * n, ratios_ptr + batch * stride_ratios_b, live_ptr + batch, n, NODES
    )
    is_elder = (parent[:, None] == parent[None, :]) & (node[None, :] < node[:, None])
    missed = tl.sum(tl.where(is_elder, tl.log(tl.maximum(1.0 - ratio, 1e-6))[None, :], 0.0), 1)
    own = tl.where(parent >= 0, tl.log(tl.maximum(ratio, 1e-6)) + missed, 0.0)
    above = _sum_above(mask_ptr + batch * n * n, own, n, NODES)
    number = node.to(tl.int64)
    if numbers_ptr is not None:
        number = tl.load(numbers_ptr + batch * n + node, counts, 0)
    notes_ptr += batch * num_notes
    slot = tl.load(notes_ptr + tl.load(places_ptr + number - 1, counts, 0), counts, 0)
    cells_ptr = notes_ptr + tl.load(places_ptr + num_kept + number - 1, counts, 0) + 2 * slot
    before = tl.load(cells_ptr, counts, -1).to(tl.int32)
    after = tl.load(cells_ptr + 1, counts, -1).to(tl.int32)
    made = tl.exp(above + missed)
    passed_ptr += batch * num_cells
    tests_ptr += batch * num_cells
    for number_of_cell in tl.static_range(2):
        cell = before if number_of_cell == 0 else after
        is_same = (cell[:, None] == cell[None, :]) & counts[None, :]
        is_first = counts & (tl.sum((is_same & (node[None, :] < node[:, None])).to(tl.int32), 1) == 0)
        _add(tests_ptr + cell, made, is_same, is_first)
        _add(passed_ptr + cell, made * ratio, is_same, is_first)


@jit(fuses=False, do_not_specialize=["n", "stride_ratios_b"])
def level_kernel(
    parents_ptr, mask_ptr, values_ptr, ratios_ptr, live_ptr, shift_ptr, weight_ptr, n, stride_ratios_b,
    NODES: tl.constexpr,
):  # fmt: skip
    """Learn a text's level from the likeliest children of its accepted nodes; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    parent, ratio, counts = _judged(
        parents_ptr + batch * n, ratios_ptr + batch * stride_ratios_b, live_ptr + batch, n, NODES
    )
    has_elder = tl.sum(((parent[:, None] == parent[None, :]) & (node[None, :] < node[:, None])).to(tl.int32), 1) > 0
    above = _sum_above(mask_ptr + batch * n * n, tl.log(tl.maximum(ratio, 1e-6)), n, NODES)
    counts &= ~has_elder
    made = tl.where(counts, tl.exp(above), 0.0)
    value = tl.load(values_ptr + batch * n + node, counts, 0.0)
    chance = tl.div_rn(value, tl.maximum(tl.load(values_ptr + batch * n + parent, counts, 1.0), 1.2e-38))
    weight = tl.load(weight_ptr + batch) + tl.sum(made * chance * (1 - chance), 0)
    weight = tl.minimum(weight, 12.0)  # reference.MOST_WEIGHT
    shift = tl.load(shift_ptr + batch) + tl.div_rn(tl.sum(made * (ratio - chance), 0), weight)
    tl.debug_barrier()  # every thread has read what is written below
    tl.store(weight_ptr + batch, weight)
    tl.store(shift_ptr + batch, shift)


@jit(fuses=False, do_not_specialize=["m", "stride_tokens_b", "stride_path_b"])
def remember_kernel(
    tokens_ptr, path_ptr, lengths_ptr, places_ptr, last_ptr, m, stride_tokens_b, stride_path_b,
    ENTRIES: tl.constexpr, NUM_PLACES: tl.constexpr,
):  # fmt: skip
    """Add an accepted path to a text's memory; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    tokens_ptr += batch * stride_tokens_b
    path_ptr += batch * stride_path_b
    places_ptr += batch * (2 * NUM_PLACES + 1)
    entry = tl.arange(0, ENTRIES)
    length = tl.minimum(tl.load(lengths_ptr + batch), m)
    older, last = tl.load(last_ptr + batch * 2), tl.load(last_ptr + batch * 2 + 1)
    following = _word(tokens_ptr, path_ptr, entry, length, older, last)
    token = _word(tokens_ptr, path_ptr, entry - 1, length, older, last)
    before = _word(tokens_ptr, path_ptr, entry - 2, length, older, last)
    number = pair_number(token, following)
    yes = tl.full((ENTRIES,), 1, tl.int1)
    tl.store(places_ptr + place_of(number, NUM_PLACES), yes, (entry < length) & (token >= 0))
    triple_ptr = places_ptr + NUM_PLACES + place_of(before * 0x27D4EB2F + number, NUM_PLACES)
    tl.store(triple_ptr, yes, (entry < length) & (before >= 0))
    end = tl.arange(0, 2)
    word = _word(tokens_ptr, path_ptr, length - 2 + end, length, older, last)
    tl.store(last_ptr + batch * 2 + end, word, end * 0 + length > 0)


@triton.jit
def _word(tokens_ptr, path_ptr, entry, length, older, last):
    """Load the token at an entry of a path; those before it are the last two of the text."""
    node = tl.load(path_ptr + entry, (entry >= 0) & (entry < length), 0)
    token = tl.load(tokens_ptr + node, (entry >= 0) & (entry < length), 0)
    return tl.where(entry >= 0, token, tl.where(entry == -1, last, older))


def learn(table: Table, kept: Sequence[Kept], verdicts: Verdicts) -> None:
    """Count the tests of a tree in two launches; see `stree.kernels.tree_growth.api`."""
    batch, n = verdicts.parents.shape
    notes = torch.cat([part for cells, slots in kept for part in (slots, cells.flatten(1))], 1)
    places = _places(tuple((slots.shape[1], cells[0].numel()) for cells, slots in kept), notes.device)
    numbers, ratios = verdicts.numbers, verdicts.ratios
    ratios = ratios if ratios.stride(1) == 1 else ratios.contiguous()
    with torch.cuda.device_of(notes):  # Triton launches on the current device, wherever the tensors are
        learn_kernel[(batch,)](
            notes, places, None if numbers is None else numbers.contiguous(), verdicts.parents.contiguous(),
            verdicts.mask.contiguous(), ratios, verdicts.is_live, table.passed, table.tests,
            n, notes.shape[1], places.shape[1], table.tests.shape[1], ratios.stride(0),
            NODES=padded(n), num_warps=learn_warps(padded(n)),
        )  # fmt: skip


def learn_level(level: Level, values: Tensor, verdicts: Verdicts) -> None:
    """Do the same in one launch."""
    batch, n = values.shape
    ratios = verdicts.ratios if verdicts.ratios.stride(1) == 1 else verdicts.ratios.contiguous()
    with torch.cuda.device_of(values):
        level_kernel[(batch,)](
            verdicts.parents.contiguous(), verdicts.mask.contiguous(), values.contiguous(), ratios, verdicts.is_live,
            level.shift, level.weight, n, ratios.stride(0), NODES=padded(n), num_warps=learn_warps(padded(n)),
        )  # fmt: skip


def remember(memory: Memory, tokens: Tensor, path: Tensor, lengths: Tensor) -> None:
    """Do the same in one launch."""
    tokens, path = (part if part.stride(1) == 1 else part.contiguous() for part in (tokens, path))
    batch, m = path.shape
    with torch.cuda.device_of(tokens):
        remember_kernel[(batch,)](
            tokens, path, lengths.contiguous(), memory.places, memory.last, m, tokens.stride(0), path.stride(0),
            ENTRIES=padded(m), NUM_PLACES=memory.num_places, num_warps=1,
        )  # fmt: skip


def learn_warps(nodes: int) -> int:
    """Choose warps by padded nodes, so that a thread holds 16 pairs of them, above 16 nodes."""
    return max(1, nodes * nodes // 512)


@constant
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
