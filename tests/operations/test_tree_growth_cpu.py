"""One layer of growth compiled for the CPU equals the same in torch: slots chosen, and columns appended."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers.growth_problems import KINDS, LAYERS, Forest, Given, relative_values, some_values
from helpers.on_device import treat_as_on_device
from torch import Tensor

from stree.drafters.candidates import Candidates
from stree.drafters.tree_builder import GrownTree
from stree.growth import Layer, Plan
from stree.kernels.dispatch import as_on_device
from stree.kernels.tree_growth import api, cpu, operands, reference
from stree.kernels.tree_growth.operands import Chosen, Layout, Terms

CPU = torch.device("cpu")
WIDTHS = (torch.float32, torch.float64)
GROWN = (*LAYERS, "fixed", "fixed with leaves")
FIXED = {
    "fixed": Plan((Layer(3, 3, slots=(0, 1, 2)), Layer(5, 2, slots=(0, 1, 2, 4, 5)), Layer(4, 1)), 12, is_fixed=True),
    "fixed with leaves": Plan((Layer(3, 4, slots=(0, 1, 3), leaves=1), Layer(4, 2, slots=(0, 1, 2, 5), leaves=2)), 9),
}

Choose = Callable[[Tensor, Tensor | None, Tensor | None, Terms], tuple[Tensor, Tensor]]


def check_choice(
    value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms, specified: Choose = reference.choose
) -> None:
    """Require the very slots of the reference, for both widths."""
    for dtype in WIDTHS:
        expected = specified(value.to(dtype).contiguous(), left, None if below is None else below.contiguous(), terms)
        found = cpu.choose(value.to(dtype), left, below, terms)
        assert [part.dtype for part in found] == [torch.long, torch.bool]
        assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "slots", "width"), [(1, 1, 1), (3, 4, 4), (1, 24, 15), (3, 90, 15), (1, 17, 64)])
def test_the_slots_chosen_are_those_of_a_stable_sort(batch: int, slots: int, width: int, kind: str) -> None:
    value = some_values(kind, batch, slots, seed=slots, device=CPU)
    for number, (left, layers_left) in enumerate(((0, 1), (1, 2), (width // 2, 1), (width, 3), (999, 1))):
        lefts = torch.full((batch,), left) - torch.arange(batch)  # also below nothing
        terms = Terms(width, 0.3, layers_left)
        check_choice(value, lefts, None, terms)
        check_choice(value, lefts, relative_values(width, number, CPU), terms)
        check_choice(value, None, None, terms)
        check_choice(value, None, relative_values(width, number, CPU), terms)


def test_what_is_worth_exactly_as_much_counts_and_a_value_equal_to_the_threshold_is_taken() -> None:
    below = torch.tensor([0.125, 0.25, 0.25, 0.5, 1.0])
    value = torch.tensor([[1.0, 0.5, 0.25, 0.25, 0.125, 0.0625]])
    taken = set()
    for left in range(25):
        for given in (below, below[:0], None):
            terms = Terms(6, 0.25, 99)
            check_choice(value, torch.tensor([left]), given, terms)
            taken.add(int(cpu.choose(value, torch.tensor([left]), given, terms)[1].sum()))
    for threshold in (0.7, 0.3):  # which float32 rounds down and up
        check_choice(torch.tensor([[0.9, threshold, 0.2]]), torch.tensor([3]), None, Terms(3, threshold, 99))
    assert taken == {0, 1, 2, 3, 4, 5, 6}
    assert cpu.choose(value, torch.tensor([9]), None, terms)[1].tolist() == [[True] * 4 + [False] * 2]


def test_a_choice_reads_values_of_any_stride_and_integers_of_any_width() -> None:
    value = some_values("ties", 3, 12, seed=1, device=CPU)
    left, below = torch.tensor([5, 2, 9]), relative_values(8, 2, CPU)
    terms = Terms(8, 0.3, 2)
    for given in (value.T.contiguous().T, torch.cat([value, value + 1], 1)[:, :12]):
        for lefts in (left.int(), torch.stack([left, left + 1], 1)[:, 0]):
            check_choice(given, lefts, below.double(), terms)
            check_choice(given, lefts, torch.stack([below, below * 0], 1)[:, 0], terms)


def test_shares_are_rounded_as_in_torch_before_they_are_compared() -> None:
    value = torch.rand(1, 6, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    below = (value[0] / value[0, :, None]).triu(1).flatten().unique()[1:]  # every share once
    for left in range(45):
        check_choice(value, torch.tensor([left]), below, Terms(6, 0.3, 1))


def test_values_that_are_hardly_numbers_are_chosen_from_as_in_torch() -> None:
    # A share of what is below 1e-38 is taken of 1e-38, in float64 too.
    value, below = torch.tensor([[1e-37, 1e-38, 3e-39, 3e-39, 1e-39, 1e-40]]), torch.tensor([0.05, 0.2, 0.9])
    for left in range(20):
        check_choice(value, torch.tensor([left]), below, Terms(6, 0.3, 1))


def test_no_row_and_no_place_are_chosen_from_as_in_torch() -> None:
    for value, width in ((torch.rand(0, 4), 3), (torch.rand(2, 4), 0)):
        check_choice(value, torch.full((len(value),), 3), relative_values(4, 1, CPU), Terms(width, 0.3, 1))


def by_another_rank(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose where a later sibling wins a tie."""
    slots, is_taken = reference.choose(value.flip(1), left, below, terms)
    return value.shape[1] - 1 - slots, is_taken


WRONG_CHOICES: dict[str, Choose] = {
    "a later slot wins a tie": by_another_rank,
    "nothing grows below": lambda value, left, _, terms: reference.choose(value, left, torch.zeros(0), terms),
    "by the threshold": lambda value, left, _, terms: reference.choose(value, left, None, terms),
    "one more is left": lambda value, left, below, terms: reference.choose(
        value, None if left is None else left + 1, below, terms
    ),
}


@pytest.mark.parametrize("control", WRONG_CHOICES)
def test_choices_that_are_wrong_in_one_thing_are_rejected(control: str) -> None:
    value, left = some_values("ties", 3, 24, seed=0, device=CPU), torch.tensor([14, 9, 20])
    given = value, left, relative_values(15, 3, CPU), Terms(15, 0.3, 2)
    check_choice(*given)
    with pytest.raises(AssertionError):
        check_choice(*given, WRONG_CHOICES[control])


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
    taken = expected._parents[:, expected.size - expected.frontier_value.shape[1] : end] >= 0
    width = int(taken.sum(1).max()) if layer.slots is None else taken.shape[1] * bool(taken.any())
    assert went == bool(width) and size == end - taken.shape[1] + width
    assert not bool(taken[:, width:].any()), "slots that are taken come first"
    for name in ("tokens", "parents", "depths", "mask", "values"):
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


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", GROWN)
def test_the_columns_appended_are_those_of_torch(
    name: str, batch: int, dtype: torch.dtype, poisoned_empty: None
) -> None:
    plan = (LAYERS | FIXED)[name]
    for seed in range(4):
        forest = Forest(plan, batch, seed, device=CPU, dtype=dtype)
        for layer in plan.layers:
            given = best_first(layer, forest.given(layer))
            found = deepcopy(forest.grown)
            check_layer(found, forest.grown, layer, given)


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
        offered = given.candidates
        apart = [torch.stack([part, part], 1)[:, 0] for part in (given.slots, given.is_taken, given.value)]
        far = offered._replace(tokens=offered.tokens.mT.contiguous().mT)
        found = deepcopy(forest.grown)
        assert found.add(layer, apart[0], apart[1], far, apart[2])
        forest.grown.add(layer, *given)
        for name in ("tokens", "parents", "depths", "mask", "values"):
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


def test_the_api_calls_the_compiled_code_on_the_cpu_and_torch_where_the_host_must_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    for owner, by in ((cpu, "compiled"), (reference, "torch")):
        monkeypatch.setattr(owner, "choose", lambda *_, word=by: asked.append(word))
    terms = Terms(4, 0.0, 1)

    def ask() -> list[str]:
        asked.clear()
        api.choose(torch.rand(1, 8), None, None, terms)
        api.choose(torch.rand(1, api.MOST_COMPARED), None, None, terms)
        return asked

    assert ask() == ["compiled", "torch"]
    treat_as_on_device(monkeypatch)
    assert ask() == ["torch", "torch"]
