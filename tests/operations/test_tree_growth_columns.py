"""The columns appended to a growing tree, compiled for the CPU and in Triton, equal the same in torch.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_columns.py
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.growth_problems import DEVICE, LAYERS, Forest, Given, grown_tree
from helpers.on_device import treat_as_on_device
from torch import Tensor

pytest.importorskip("triton")

from stree.drafters.candidates import Candidates
from stree.drafters.tree_builder import GrownTree
from stree.growth import Layer, Plan
from stree.kernels.dispatch import as_on_device
from stree.kernels.step.texts import Seen
from stree.kernels.tree_growth import api, cpu, operands
from stree.kernels.tree_growth.operands import Chosen, Layout

CPU = torch.device("cpu")
FIXED = {
    "fixed": Plan((Layer(3, 3, slots=(0, 1, 2)), Layer(5, 2, slots=(0, 1, 2, 4, 5)), Layer(4, 1)), 12, is_fixed=True),
    "fixed with leaves": Plan((Layer(3, 4, slots=(0, 1, 3), leaves=1), Layer(4, 2, slots=(0, 1, 2, 5), leaves=2)), 9),
}
COLUMNS = ("tokens", "parents", "depths", "mask", "values")


# Compiled.


def best_first(layer: Layer, given: Given) -> Given:
    """Put slots that are taken first, the best of them before all, as a choice by value does."""
    if layer.slots is not None:
        return given
    value = given.value.flatten(1).gather(1, given.slots) * given.is_taken
    order = value.sort(dim=1, descending=True, stable=True).indices
    return given._replace(slots=given.slots.gather(1, order), is_taken=given.is_taken.gather(1, order))


def check_layer(found: GrownTree, expected: GrownTree, layer: Layer, given: Given) -> None:
    """Append a layer compiled and in torch; the columns that one leaves out are padding in the other."""
    before = deepcopy(found._columns)
    went = found.add(layer, *given)
    with as_on_device(triton=False):
        assert expected.add(layer, *given)
    size, end = found.size, expected.size
    taken = expected._columns.parents[:, expected.size - expected.frontier_value.shape[1] : end] >= 0
    width = int(taken.sum(1).max()) if layer.slots is None else taken.shape[1] * bool(taken.any())
    assert went == bool(width) and size == end - taken.shape[1] + width
    assert not bool(taken[:, width:].any()), "slots that are taken come first"
    for name in COLUMNS:
        one, other, old = (getattr(tree, name) for tree in (found._columns, expected._columns, before))
        last = size - (name == "values")
        assert torch.equal(one[:, :last], other[:, :last]), name
        assert torch.equal(one[:, last:], old[:, last:]), f"{name} of columns that are not there"
    assert torch.equal(found.left, expected.left)
    if went:
        assert torch.equal(found.frontier_value, expected.frontier_value[:, :width])
        assert found.frontier_value.dtype == given.value.dtype
        assert (found.num_layers, found._begin, found._width) == (expected.num_layers, expected._begin, layer.width)
        assert len(found._leaves) == len(expected._leaves)
        for parts, others in zip(found._leaves, expected._leaves, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(parts, others, strict=True))


@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [
        *((name, 3, torch.float32) for name in (*LAYERS, *FIXED)),
        ("drawn", 1, torch.float64),
        ("fixed", 1, torch.float64),
    ],
)
def test_the_columns_appended_are_those_of_torch(name: str, batch: int, dtype: torch.dtype) -> None:
    plan = (LAYERS | FIXED)[name]
    for seed in range(3):
        forest = Forest(plan, batch, seed, device=CPU, dtype=dtype)
        for layer in plan.layers:
            check_layer(deepcopy(forest.grown), forest.grown, layer, best_first(layer, forest.given(layer)))


@pytest.mark.parametrize("name", ["drawn", "fixed"])
def test_a_layer_of_which_nothing_is_taken_leaves_the_columns_as_they_are(name: str) -> None:
    plan = (LAYERS | FIXED)[name]
    forest = Forest(plan, 2, 0, device=CPU)
    given = forest.given(plan.layers[0])
    check_layer(deepcopy(forest.grown), forest.grown, plan.layers[0], given._replace(is_taken=given.is_taken & False))


@pytest.mark.parametrize(
    ("num_nodes", "values", "kept"),
    [(3, (0.5, 0.4), 1), (3, (0.5, 0.5), 2), (3, (0.95, 0.85), 2), (2, (0.5, 0.4), 0), (9, (0.5, 0.0), 2)],
)
def test_a_node_goes_where_as_many_are_better_and_stays_where_it_is_worth_nothing(
    num_nodes: int, values: tuple[float, float], kept: int
) -> None:
    plan = Plan((Layer(2, 2), Layer(2, 2)), num_nodes, is_pruned=True)
    grown = Forest(plan, 1, 0, device=CPU).grown
    slots, tokens = torch.tensor([[0, 1]]), torch.tensor([[[5, 6], [7, 8]]])
    for layer, value in zip(plan.layers, ([[[0.9, 0.8]]], [[values, (0.7, 0.7)]]), strict=True):
        worth = torch.tensor(value)
        given = Given(slots, slots >= 0, Candidates(tokens[:, : worth.shape[1]], worth), worth)
        found = deepcopy(grown)
        check_layer(found, grown, layer, given)
    assert found.size == 4 + kept


def test_strides_of_what_is_appended_change_nothing() -> None:
    plan = LAYERS["drawn"]
    forest = Forest(plan, 3, 1, device=CPU)
    for layer in plan.layers:
        given = best_first(layer, forest.given(layer))
        slots, is_taken, value = (torch.stack([t, t], 1)[:, 0] for t in (given.slots, given.is_taken, given.value))
        far = given.candidates._replace(tokens=given.candidates.tokens.mT.contiguous().mT)
        found = deepcopy(forest.grown)
        assert found.add(layer, slots, is_taken, far, value)
        forest.grown.add(layer, *given)
        for name in COLUMNS:
            assert torch.equal(getattr(found._columns, name), getattr(forest.grown._columns, name)), name


@pytest.mark.parametrize("change", [{"num_nodes": 7}, {"num_nodes": None}, {"frontier": 1}, {"width": 4}], ids=str)
def test_a_layout_that_is_wrong_in_one_thing_is_rejected(
    change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LAYERS["pruned"]
    forest = Forest(plan, 3, 0, device=CPU)
    append = cpu.append

    def wrong(columns: operands.Columns, chosen: Chosen, left: Tensor, layout: Layout) -> operands.Appended:
        return append(columns, chosen, left, replace(layout, **change))  # type: ignore[arg-type]

    noticed = []
    for layer in plan.layers:
        given = best_first(layer, forest.given(layer))
        check_layer(deepcopy(forest.grown), deepcopy(forest.grown), layer, given)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "append", wrong)
            try:
                check_layer(deepcopy(forest.grown), deepcopy(forest.grown), layer, given)
            except AssertionError:
                noticed.append(layer)
        forest.grown.add(layer, *given)
    assert noticed


# In Triton.


@pytest.mark.parametrize(
    ("name", "batch"),
    slow_unless(lambda name, _: name in [*LAYERS][:2], [("wide", 1), *((name, 3) for name in LAYERS)]),
)
def test_the_columns_appended_and_the_tree_cut_out_of_them_are_those_of_torch(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch)
    for seed in range(1 if "wide" in name else 3):
        expected = grown_tree(name, batch, seed)
        with as_on_device():
            found = grown_tree(name, batch, seed)
        for part in COLUMNS:
            assert torch.equal(getattr(found._columns, part), getattr(expected._columns, part)), part
        assert torch.equal(found.frontier_value, expected.frontier_value)
        chosen = expected.select(LAYERS[name])
        wanted = expected.proposed(None), expected.proposed(chosen)
        with as_on_device():
            picked = found.select(LAYERS[name])
            given = found.proposed(None), found.proposed(chosen)
        assert chosen is picked is None or (chosen is not None and picked is not None and torch.equal(picked, chosen))
        for one, other in zip(given, wanted, strict=True):
            for part in one.__slots__:
                assert torch.equal(getattr(one, part), getattr(other, part)), part
        assert LAYERS[name].is_pruned or torch.equal(found.left, expected.left)  # a pruned tree has no budget
        assert (found.size, found.num_layers) == (expected.size, expected.num_layers)


def test_columns_are_made_of_operands_of_any_strides() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator).to(DEVICE)

    text, lengths, pending = drawn(50, 3, 5), 1 + drawn(5, 3), drawn(50, 3)
    taken, tokens, kept = drawn(3, 3, 4) > 0, drawn(50, 3, 1, 6), torch.tensor([[0, 1, 3]] * 3, device=DEVICE)
    values, slots = drawn(9, 3, 1, 6) / 9, torch.arange(24, device=DEVICE).view(3, 8) % 8
    layout = Layout(width=3, frontier=1, size=2, num_nodes=None)

    def made(laid: Callable[[Tensor], Tensor], slots: Tensor) -> list[Tensor]:
        columns = api.begin(Seen(laid(text), laid(lengths), laid(pending)), 8)
        left = torch.full((3,), 9, device=DEVICE)
        appended = api.append(columns, Chosen(slots, laid(taken), laid(values), laid(tokens)), left, layout)
        cut = api.cut(columns, laid(kept), 5)
        parts = [getattr(part, name) for part in (columns, appended, cut) for name in part.__slots__]
        return [left, *(part for part in parts if isinstance(part, Tensor))]

    with as_on_device():
        apart = made(lambda tensor: torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0], slots[:, 1:5])
        together = made(Tensor.clone, slots[:, 1:5].contiguous())
    assert all(torch.equal(found, expected) for found, expected in zip(apart, together, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on a GPU")
def test_kernels_without_a_gpu_or_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grown, slots = grown_tree("one", 1, 0), torch.zeros(1, 1, dtype=torch.long)
    chosen = Chosen(slots, slots > 0, slots.float()[..., None], slots[..., None])
    layout = Layout(width=1, frontier=1, size=2, num_nodes=None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    calls: dict[str, Callable[[], object]] = {
        "begin": lambda: api.begin(Seen(slots, slots[0] + 1, slots[0]), 5),
        "append": lambda: api.append(grown._columns, chosen, grown.left, layout),
        "select": lambda: api.select(grown._columns, 3, 1, by_value=True),
        "cut": lambda: api.cut(grown._columns, None, 2),
    }
    for name, call in calls.items():
        with as_on_device(), pytest.raises(RuntimeError, match=f"{name} needs CUDA tensors, got a tensor on cpu"):
            call()
