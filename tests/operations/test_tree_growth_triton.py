"""One layer of growth in Triton equals the same in torch: the slots chosen, their ratings, the columns appended.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_triton.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from helpers.growth_problems import (
    DEVICE,
    KINDS,
    LAYERS,
    SIZES,
    Ranked,
    begun,
    grown_tree,
    relative_values,
    some_siblings,
    some_table,
    some_values,
)
from helpers.launch_keys import launch_keys
from helpers.on_device import treat_as_on_device
from torch import Tensor

from stree.kernels.dispatch import as_on_device

pytest.importorskip("triton")

from stree.kernels.tree_growth import api, operands, reference
from stree.kernels.tree_growth import slots_kernel as kernels
from stree.kernels.tree_growth.operands import Memory, Siblings, Terms, Words

ROUNDING = 1e-5, 1e-7  # relative and absolute: a logarithm and an exponential of float32 differ in their last bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "slots", "width"),
    [(1, 1, 1), (3, 4, 4), (1, 24, 15), (2, 40, 9), pytest.param(1, 17, 64, marks=pytest.mark.slow)],
)
def test_the_slots_chosen_are_those_of_a_stable_sort(batch: int, slots: int, width: int, kind: str) -> None:
    value = some_values(kind, batch, slots, seed=slots)
    for number, (left, layers_left) in enumerate(((0, 1), (1, 2), (width // 2, 1), (width, 3), (999, 1))):
        lefts = torch.full((batch,), left, device=DEVICE) - torch.arange(batch, device=DEVICE).clamp(max=left)
        for size in (None, number):
            below = None if size is None else relative_values(width, size)
            check_choice(value, lefts, below, width, layers_left)
        check_choice(value, None, None, width, layers_left)


@pytest.mark.parametrize("kind", ["ties", "few"])
def test_the_slots_of_a_large_layer_are_those_of_a_stable_sort(kind: str) -> None:
    value = some_values(kind, 1, 378, seed=5)
    for left, below in ((50, relative_values(63, 3)), (70, None)):
        check_choice(value, torch.tensor([left], device=DEVICE), below, 63, 2)


def test_what_is_worth_exactly_as_much_below_a_slot_counts() -> None:
    below = torch.tensor([0.125, 0.25, 0.25, 0.5, 1.0], device=DEVICE)
    value = torch.tensor([[1.0, 0.5, 0.25, 0.25, 0.125, 0.0625]], device=DEVICE)
    for left in range(25):
        check_choice(value, torch.tensor([left], device=DEVICE), below, 6, 1)


def check_choice(value: Tensor, left: Tensor | None, below: Tensor | None, width: int, layers_left: int) -> None:
    """Compare a choice with the reference's."""
    terms = Terms(width, 0.3, layers_left)
    expected, found = (owner.choose(value, left, below, terms) for owner in (reference, kernels))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_choice_reads_rows_of_any_stride_and_a_value_equal_to_the_threshold_is_taken() -> None:
    value = torch.tensor([[0.5, 0.25, 0.75, 0.25], [0.25, 0.25, 0.5, 0.125]], device=DEVICE)
    for given in (value, value.T.contiguous().T, torch.cat([value, value], 1)[:, :4]):
        terms = Terms(width=3, threshold=0.25, layers_left=99)
        slots, is_taken = kernels.choose(given, torch.tensor([9, 9], device=DEVICE), None, terms)
        assert slots.tolist() == [[2, 0, 1], [2, 0, 1]] and bool(is_taken.all())


@pytest.mark.parametrize(("batch", "above", "ranks"), SIZES)
def test_ratings_by_a_table_are_those_of_torch(batch: int, above: int, ranks: int) -> None:
    for seed in range(4):
        children = some_siblings(batch, above, ranks, seed)
        table = some_table(batch, max(ranks, 6), seed)
        operands = table, children
        expected, found = reference.rate_by_table(*operands), kernels.rate_by_table(*operands)
        for name in expected._fields:
            one, other = getattr(found, name), getattr(expected, name)
            assert torch.equal(one, other) if DEVICE.type == "cpu" else torch.allclose(one, other, *ROUNDING), name
        for row in found.priority.flatten(0, 1):
            assert bool((row[row > 0].diff() <= 0).all())


@pytest.mark.parametrize("edge", ["sharpness", "confidence"])
def test_a_number_at_an_edge_of_the_table_falls_below_it(edge: str) -> None:
    table = some_table(1, 2, seed=0)
    edges = getattr(table, edge)
    # Powers of two have exact squares and quotients.
    table = replace(table, **{edge: torch.tensor([2.0**-k for k in range(2 * len(edges), 0, -2)], device=DEVICE)})
    norms = torch.tensor([[2.0**-k for k in range(8)]], device=DEVICE)
    probs = torch.tensor([[[2.0**-k, 0.0] for k in range(8)]], device=DEVICE)
    operands = table, Siblings(torch.ones(1, 8, device=DEVICE), probs, norms)
    expected, found = reference.rate_by_table(*operands).cells, kernels.rate_by_table(*operands).cells
    assert torch.equal(found, expected) and len(set(expected[0, :, 0, 0 if edge == "sharpness" else 1].tolist())) > 4


@pytest.mark.parametrize(("batch", "above", "ranks"), SIZES)
def test_ratings_by_rank_are_those_of_torch(batch: int, above: int, ranks: int) -> None:
    drawn = [Ranked.draw(batch, above, ranks, seed) for seed in range(4)]
    for ranked in (*drawn, begun(drawn[2])):
        expected, found = reference.rate_by_rank(*ranked), kernels.rate_by_rank(*ranked)
        assert torch.allclose(found, expected, *ROUNDING)
        assert torch.equal(found > 0, expected > 0) and bool((found <= ranked.given.reach[..., None]).all())


def test_what_a_text_holds_is_known_by_its_last_two_words_and_the_tree_s() -> None:
    memory = Memory.empty(2, DEVICE)
    texts = torch.tensor([[5, 6, 7, 5, 6, 8], [6, 7, 0, 0, 0, 0]], device=DEVICE)
    reference.remember(memory, texts, None, torch.tensor([6, 2], device=DEVICE, dtype=torch.int32))
    # A root 7 without a leaf before it, a root 6 behind its leaf 9, and below the first root a node 5.
    tokens, parents = torch.tensor([[7, 0, 5], [9, 6, 0]]), torch.tensor([[-1, -1, 0], [-1, 0, -1]], dtype=torch.int32)
    children = torch.tensor([[[5, 6]], [[7, 8]]], device=DEVICE)
    words = Words(children, tokens.to(DEVICE), parents.to(DEVICE), 1, torch.tensor([0, 1], device=DEVICE))
    pairs, triples = reference._are_held(memory, words)
    assert pairs.tolist() == [[[True, False]], [[True, False]]]
    assert not bool(triples.any()), "8 7 5 was never said, nor 9 6 7"
    below = Words(children[:1], tokens[:1].to(DEVICE), parents[:1].to(DEVICE), 2, None)
    first = Memory(memory.places[:1], memory.last[:1])
    pairs, triples = reference._are_held(first, below)
    assert pairs.tolist() == [[[False, True]]] and triples.tolist() == [[[False, True]]], "7 5 6 was said"
    nothing = Memory.empty(1, DEVICE)
    nothing.places[:] = True
    root = Words(children[:1], tokens[:1].to(DEVICE), parents[:1].to(DEVICE), 1, torch.tensor([0], device=DEVICE))
    pairs, triples = reference._are_held(nothing, root)
    assert bool(pairs.all()) and not bool(triples.any()), "after a single token there is no triple"


@pytest.fixture
def launched() -> Iterator[None]:
    """Let kernels do what they would do on a GPU."""
    with as_on_device():
        yield


def test_columns_are_laid_out_and_cut_by_a_kernel_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = grown_tree("one", 1, 0)
    slots = torch.zeros(1, 1, dtype=torch.long)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE.type == "cpu":
        with pytest.raises(RuntimeError, match="begin needs CUDA tensors, got a tensor on cpu"):
            api.begin(slots[0], slots[0], slots[0] > 0, 5)
        with pytest.raises(RuntimeError, match="select needs CUDA tensors, got a tensor on cpu"):
            api.select(grown._columns, 3, 1, by_value=True)
        with pytest.raises(RuntimeError, match="cut needs CUDA tensors, got a tensor on cpu"):
            api.cut(grown._columns, None, 2)


def test_columns_are_appended_by_a_kernel_where_kernels_are_launched(
    launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = grown_tree("one", 1, 0)
    slots = torch.zeros(1, 1, dtype=torch.long)
    chosen = operands.Chosen(slots, slots > 0, slots.float()[..., None], slots[..., None])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE.type == "cpu":
        with pytest.raises(RuntimeError, match="append needs CUDA tensors, got a tensor on cpu"):
            layout = operands.Layout(width=1, frontier=0, size=2, num_nodes=None)
            api.append(grown._columns, chosen, grown.left, layout)


def test_what_no_kernel_takes_is_left_to_torch(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("choose", "rate_by_table", "rate_by_rank"):
        monkeypatch.setattr(kernels, name, lambda *_, name=name, **__: asked.append(name))
    terms = Terms(width=4, threshold=0.0, layers_left=1)
    small = torch.rand(1, 8, device=DEVICE)
    api.choose(small.double(), None, None, terms)
    api.choose(torch.rand(1, api.MAX_SLOTS + 1, device=DEVICE), None, None, terms)
    wide = torch.rand(1, api.MAX_WIDTH + 9, device=DEVICE)
    api.choose(wide, None, None, replace(terms, width=api.MAX_WIDTH + 1))
    left, below = torch.ones(1, dtype=torch.long, device=DEVICE), torch.rand(api.MAX_BELOW + 1, device=DEVICE)
    api.choose(small, left, below.sort().values, terms)
    assert asked == []
    api.choose(small, None, None, terms)
    assert asked == ["choose"]


def test_selections_of_equal_padded_sizes_share_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_value in (False, True):
        found = []
        for batch, room, size, count in ((1, 40, 20, 10), (3, 33, 33, 16), (2, 64, 18, 17)):
            tokens = torch.zeros(batch, dtype=torch.long, device=DEVICE)
            columns = api.begin(tokens, tokens, tokens > 0, room)
            with launch_keys(monkeypatch) as keys:
                api.select(columns, size, count, by_value=by_value)
            found.append(keys)
        assert found[0] == found[1] != found[2] and [name for name, _ in found[0]] == ["select_kernel"]


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", LAYERS)
def test_the_columns_appended_and_the_tree_cut_out_of_them_are_those_of_torch(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch)
    for seed in range(3):
        expected = grown_tree(name, batch, seed)
        with as_on_device():
            found = grown_tree(name, batch, seed)
        for part in ("_tokens", "_parents", "_depths", "_mask", "_value", "frontier_value"):
            assert torch.equal(getattr(found, part), getattr(expected, part)), part
        chosen = expected.select(LAYERS[name])
        with as_on_device():
            picked = found.select(LAYERS[name])
        assert chosen is picked is None or (chosen is not None and picked is not None and torch.equal(picked, chosen))
        wanted = expected.proposed(None), expected.proposed(chosen)
        with as_on_device():
            given = found.proposed(None), found.proposed(chosen)
        for one, other in zip(given, wanted, strict=True):
            for part in one.__slots__:
                assert torch.equal(getattr(one, part), getattr(other, part)), part
        assert LAYERS[name].is_pruned or torch.equal(found.left, expected.left)  # a pruned tree has no budget
        assert (found.size, found.num_layers) == (expected.size, expected.num_layers)


def test_columns_are_made_of_operands_of_any_strides(launched: None) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator).to(DEVICE)

    pending, leaf, has_leaf, taken, tokens = (
        drawn(50, 3),
        drawn(50, 3),
        drawn(2, 3) > 0,
        drawn(3, 3, 4) > 0,
        drawn(50, 3, 1, 6),
    )
    values, slots = drawn(9, 3, 1, 6) / 9, torch.arange(24, device=DEVICE).view(3, 8) % 8
    layout = operands.Layout(width=3, frontier=0, size=2, num_nodes=None)

    def made(laid: Callable[[Tensor], Tensor], slots: Tensor) -> list[Tensor]:
        columns = api.begin(laid(pending), laid(leaf), laid(has_leaf), 8)
        chosen = operands.Chosen(slots, laid(taken), laid(values), laid(tokens))
        left = torch.full((3,), 9, device=DEVICE)
        appended = api.append(columns, chosen, left, layout)
        cut = api.cut(columns, laid(drawn(1, 3, 3) + torch.tensor([0, 1, 3], device=DEVICE)), 5)
        parts = [getattr(part, name) for part in (columns, appended, cut) for name in part.__slots__]
        return [left, *(part for part in parts if isinstance(part, Tensor))]

    apart = made(lambda tensor: torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0], slots[:, 1:5])
    for found, expected in zip(apart, made(Tensor.clone, slots[:, 1:5].contiguous()), strict=True):
        assert torch.equal(found, expected)
