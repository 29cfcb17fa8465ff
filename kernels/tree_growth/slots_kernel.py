"""Choice and rating of the slots of a layer in Triton: one launch for each operation."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.jit import jit
from stree.kernels.tiles import padded
from stree.kernels.tree_growth.operands import Children, Level, Memory, RankFit, Ratings, Table, Terms, Words

__all__ = ["choose", "pair_number", "place_of", "rate_by_rank", "rate_by_table"]

NODES = 32  # whose children a program of one warp rates, a lane a node
BELOW_STEPS = 8  # halvings of a list of up to 255 values


@triton.jit
def _best(value_ptr, slots, SLOTS: tl.constexpr, WIDTH: tl.constexpr):
    """Sort the best values, not negative, and their indices, of equal ones the first; 0 past the last slot."""
    lane = tl.arange(0, SLOTS)
    value = tl.load(value_ptr + lane, lane < slots, 0.0)
    value = tl.where(value > 0, value, 0.0)  # the bits of numbers that are not negative are ordered as they are
    key = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - lane).to(tl.int64)
    best = tl.topk(tl.where(lane < slots, key, -1), WIDTH)
    place = tl.arange(0, WIDTH)
    ordered = tl.where(place < slots, (best >> 32).to(tl.int32), 0).to(tl.float32, bitcast=True)
    return ordered, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _size_down_to(ordered, below_ptr, num_below, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Count what is worth as much as each slot: the slots before it, itself, and the ascending values below them."""
    place = tl.arange(0, WIDTH)
    tiny = tl.full((WIDTH,), 1.2e-38, tl.float32)  # Triton 3.6 makes a subnormal literal a float64
    least = tl.div_rn(ordered[:, None], tl.maximum(ordered, tiny)[None, :])
    lower = tl.zeros((WIDTH, WIDTH), tl.int32)  # values that are less
    for step in tl.static_range(STEPS):
        further = lower + (1 << (STEPS - 1 - step))
        inside = further <= num_below
        value = tl.load(below_ptr + further - 1, inside, 0.0)
        lower = tl.where(inside & (value < least), further, lower)
    worth = tl.where(place[None, :] <= place[:, None], num_below - lower, 0)
    return place + 1 + tl.sum(worth, 1)


@jit(fuses=False, do_not_specialize=["slots", "width", "num_below", "threshold", "layers_left", "stride_value_b"])
def choose_kernel(
    value_ptr, left_ptr, below_ptr, slots_ptr, taken_ptr,
    slots, width, num_below, threshold, layers_left, stride_value_b,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Choose the best slots of a layer; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    ordered, index = _best(value_ptr + batch * stride_value_b, slots, SLOTS, WIDTH)
    is_taken = (ordered > 0) & (place < width)
    if left_ptr is not None:
        left = tl.load(left_ptr + batch).to(tl.int32)
        if below_ptr is not None:
            is_worth = _size_down_to(ordered, below_ptr, num_below, WIDTH, STEPS) <= left
        else:
            is_worth = (ordered >= threshold) | (place < left // layers_left)
        is_taken = is_taken & is_worth & (place < left)
    out = batch * width
    tl.store(slots_ptr + out + place, index.to(tl.int64), place < width)
    tl.store(taken_ptr + out + place, is_taken, place < width)


@triton.jit
def place_of(number, NUM_PLACES: tl.constexpr):
    """Hash the number of a pair or a triple of tokens, as `reference` does."""
    return (number ^ (number >> 17)) & (NUM_PLACES - 1)


@triton.jit
def pair_number(token, following):
    """Number a pair of tokens, as `reference` does."""
    return token * 0x1E3779B1 + following * 0x05EBCA77


@triton.jit
def _are_held(places_ptr, behind, before, child, inside, NUM_PLACES: tl.constexpr):
    """Whether a text holds the pairs and the triples that children would make."""
    number = pair_number(behind, child)
    pair = tl.load(places_ptr + place_of(number, NUM_PLACES), inside, 0) != 0
    triple_ptr = places_ptr + NUM_PLACES + place_of(before * 0x27D4EB2F + number, NUM_PLACES)
    return pair, tl.load(triple_ptr, inside, 0) != 0


@jit(
    fuses=False,
    do_not_specialize=["above", "ranks", "num_ranks", "stride_reach_b", "first", "stride_tokens_b", "stride_parents_b"],
)
def rank_kernel(
    reach_ptr, probs_ptr, norms_ptr, level_ptr, confidence_ptr, sharpness_ptr, text_ptr, shift_ptr,
    places_ptr, children_ptr, tokens_ptr, parents_ptr, value_ptr, above, ranks, num_ranks, stride_reach_b,
    first, stride_tokens_b, stride_parents_b, NODES: tl.constexpr, NUM_PLACES: tl.constexpr,
):  # fmt: skip
    """Rate children that are not drawn, sibling after sibling; grid (blocks of nodes, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    inside = node < above
    reach = tl.load(reach_ptr + batch * stride_reach_b + node, inside, 0.0)
    norm = tl.load(norms_ptr + batch * above + node, inside, 0.0)
    blunt = tl.log(tl.maximum(1 - norm * norm, 0.02))  # reference.LEAST_BLUNT
    place = (batch * above + node) * ranks
    pairs, triples = tl.zeros((NODES,), tl.int32), tl.zeros((NODES,), tl.int32)  # children that make such
    behind, before = tl.zeros((NODES,), tl.int64), tl.zeros((NODES,), tl.int64)
    if children_ptr is not None:
        places_ptr += batch * (2 * NUM_PLACES + 1)
        tokens_ptr += batch * stride_tokens_b
        behind = tl.load(tokens_ptr + first + node, inside, 0)
        parent = tl.load(parents_ptr + batch * stride_parents_b + first + node, inside, 0)
        before = tl.load(tokens_ptr + tl.maximum(parent, 0), inside, 0)
        for rank in range(ranks):
            is_there = inside & (tl.load(probs_ptr + place + rank, inside, 0.0) > 0)
            child = tl.load(children_ptr + place + rank, is_there, 0)
            pair, triple = _are_held(places_ptr, behind, before, child, is_there, NUM_PLACES)
            pairs += pair.to(tl.int32)
            triples += triple.to(tl.int32)
    best = tl.full((NODES,), float("-inf"), tl.float32)
    likeliest = tl.full((NODES,), -1, tl.int32)
    for rank in range(ranks):
        prob = tl.load(probs_ptr + place + rank, inside, 0.0)
        odds = tl.load(level_ptr + rank) + tl.load(confidence_ptr + rank) * tl.log(tl.maximum(prob, 1e-9))
        odds = odds - tl.load(sharpness_ptr + rank) * blunt
        if children_ptr is not None:
            child = tl.load(children_ptr + place + rank, inside & (prob > 0), 0)
            pair, triple = _are_held(places_ptr, behind, before, child, inside & (prob > 0), NUM_PLACES)
            odds += tl.where(pair, tl.load(text_ptr + rank), 0.0)
            odds += tl.where(triple, tl.load(text_ptr + num_ranks + rank), 0.0)
            odds += tl.where(pairs > pair.to(tl.int32), tl.load(text_ptr + 2 * num_ranks + rank), 0.0)
            odds += tl.where(triples > triple.to(tl.int32), tl.load(text_ptr + 3 * num_ranks + rank), 0.0)
        is_likelier = (prob > 0) & (odds > best)
        best = tl.where(is_likelier, odds, best)
        likeliest = tl.where(is_likelier, rank, likeliest)
        tl.store(value_ptr + place + rank, odds, inside)  # read again below, by the same thread
    shifted = best + tl.load(shift_ptr + batch)
    most = tl.div_rn(1.0, 1.0 + tl.exp(-shifted))
    left = tl.div_rn(1.0 + tl.exp(best), 1.0 + tl.exp(shifted))  # by the likeliest to the others, relative to the fit
    for rank in range(ranks):
        prob = tl.load(probs_ptr + place + rank, inside, 0.0)
        odds = tl.load(value_ptr + place + rank, inside, 0.0)
        chance = tl.minimum(tl.div_rn(1.0, 1.0 + tl.exp(-odds)) * left, most)
        chance = tl.where(rank == likeliest, most, chance)
        tl.store(value_ptr + place + rank, reach * tl.where(prob > 0, chance, 0.0), inside)


@triton.jit
def _count_below(value, edges_ptr, EDGES: tl.constexpr):
    """Count the edges that are less than a value."""
    count = (value > tl.load(edges_ptr)).to(tl.int32)
    for edge in tl.static_range(1, EDGES):
        count += (value > tl.load(edges_ptr + edge)).to(tl.int32)
    return count


@jit(fuses=False, do_not_specialize=["above", "ranks", "most", "num_cells", "stride_reach_b"])
def table_kernel(
    reach_ptr, probs_ptr, norms_ptr, passed_ptr, tests_ptr, sharpness_ptr, confidence_ptr,
    priority_ptr, value_ptr, cells_ptr, above, ranks, most, num_cells, stride_reach_b,
    SHARPNESS: tl.constexpr, CONFIDENCE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Rate drawn children, sibling after sibling, in the order and precision of torch's; grid (blocks, batch).

    Cumulative sums and products are carried in float64, as torch's are on the CPU: cells are the same there.
    """
    batch = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    inside = node < above
    reach = tl.load(reach_ptr + batch * stride_reach_b + node, inside, 0.0)
    norm = tl.load(norms_ptr + batch * above + node, inside, 0.0)
    place = (batch * above + node) * ranks
    passed_ptr += batch * num_cells
    tests_ptr += batch * num_cells
    sharp = _count_below(norm * norm, sharpness_ptr, SHARPNESS)
    spent = tl.zeros((NODES,), tl.float64)
    untested = reach.to(tl.float64)
    least = tl.full((NODES,), float("inf"), tl.float32)
    for rank in range(ranks):
        prob = tl.load(probs_ptr + place + rank, inside, 0.0)
        share = tl.div_rn(prob, tl.maximum(1.0 - spent.to(tl.float32), 1e-6))
        before = sharp + rank * (SHARPNESS + 1)
        after = (most * (SHARPNESS + 1) + before * (CONFIDENCE + 1)) + _count_below(share, confidence_ptr, CONFIDENCE)
        expected = tl.div_rn(tl.load(passed_ptr + before, inside, 0.0), tl.load(tests_ptr + before, inside, 1.0))
        found = tl.div_rn(tl.load(passed_ptr + after, inside, 0.0), tl.load(tests_ptr + after, inside, 1.0))
        upper = untested.to(tl.float32)
        least = tl.minimum(least, upper * expected)
        tl.store(priority_ptr + place + rank, tl.where(prob > 0, least, 0.0), inside)
        tl.store(value_ptr + place + rank, tl.where(prob > 0, upper * found, 0.0), inside)
        tl.store(cells_ptr + (place + rank) * 2, before.to(tl.int64), inside)
        tl.store(cells_ptr + (place + rank) * 2 + 1, after.to(tl.int64), inside)
        spent += prob.to(tl.float64)
        untested = untested * (1.0 - found).to(tl.float64)


def choose(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose the best slots; see `stree.kernels.tree_growth.api`."""
    value = value if value.stride(1) == 1 else value.contiguous()
    batch, count = value.shape
    width = min(terms.width, count)
    slots = value.new_empty(batch, width, dtype=torch.int64)
    is_taken = value.new_empty(batch, width, dtype=torch.bool)
    room, chosen = padded(count), padded(width)
    with torch.cuda.device_of(value):  # Triton launches on the current device, wherever the tensors are
        choose_kernel[(batch,)](
            value, None if left is None else left.contiguous(), below, slots, is_taken,
            count, width, 0 if below is None else len(below), terms.threshold, terms.layers_left, value.stride(0),
            SLOTS=room, WIDTH=chosen, STEPS=BELOW_STEPS, num_warps=choose_warps(room, chosen),
        )  # fmt: skip
    return slots, is_taken


def choose_warps(slots: int, width: int) -> int:
    """Choose warps by padded sizes, so that pairs of 128 taken slots do not spill; one warp needs no barrier."""
    return 16 if width > 64 else 1 if slots <= 32 else 4


def rate_by_rank(fit: RankFit, level: Level, memory: Memory, given: Children) -> Tensor:
    """Rate children that are not drawn; see `stree.kernels.tree_growth.api`."""
    reach, probs, norms = _probs(given)
    batch, above, ranks = probs.shape
    words, strides = _words(given.words)
    value = torch.empty_like(probs)
    with torch.cuda.device_of(probs):
        rank_kernel[(-(-above // NODES), batch)](
            reach, probs, norms, fit.level, fit.by_confidence, fit.by_sharpness, fit.by_text, level.shift,
            memory.places, *words, value, above, ranks, len(fit.level), reach.stride(0), *strides,
            NODES=NODES, NUM_PLACES=memory.num_places, num_warps=1,
        )  # fmt: skip
    return value


def rate_by_table(table: Table, given: Children) -> Ratings:
    """Rate drawn children; see `stree.kernels.tree_growth.api`."""
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
        )  # fmt: skip
    return ratings


def _probs(given: Children) -> tuple[Tensor, Tensor, Tensor]:
    """Return values of the nodes, probabilities of their children and norms, laid out as kernels read them."""
    reach = given.reach if given.reach.stride(1) == 1 else given.reach.contiguous()
    return reach, given.probs.contiguous(), given.norms.contiguous()


def _words(words: Words | None) -> tuple[list[Tensor | None], list[int]]:
    """Return tokens of children and columns, parents; first column, strides of tokens and parents."""
    if words is None:
        return [None] * 3, [0, 0, 0]
    tokens, parents = words.tokens, words.parents
    strides = [words.first, tokens.stride(0), parents.stride(0)]
    return [words.children.contiguous(), tokens, parents], strides
