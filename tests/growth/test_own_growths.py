"""Mistakes in growths of a user's own are refused by class and field before anything runs."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stree.growth import AcceptanceModel, BaseGrowth, Calibrated, Layer, Plan, Proposal, Stop, checked_plan
from stree.growth.stops import StoppedModel
from stree.testing import check_growth
from stree.testing.drafting import Drafting
from stree.testing.outcomes import TooManyOutcomes


@dataclass(frozen=True)
class Laid(BaseGrowth):
    layers: Any
    nodes: int = 2

    def plan(self, budget: int) -> Plan:
        return Plan(self.layers, self.nodes, is_fixed=True)


class Undeclared(BaseGrowth):
    def __init__(self, width: int) -> None:
        self.width = width

    def plan(self, budget: int) -> Plan:
        return Plan((Layer(self.width, self.width),), self.width)


TWO = Layer(2, 2, (0, 1))
WRONG = [
    (Laid((Layer(2, 3, (0, 2)),)), ValueError, r"Laid.plan\(3\): slot 2 of layers\[0\].slots is rank 2 .* slot 1"),
    (Laid((Layer(2, 2, (0, 5)),)), ValueError, r"slot 5 of layers\[0\].slots must be below 2: 1 nodes above x 2 ranks"),
    (Laid((Layer(1, 2, (0,)), Layer(1, 1, (1,)))), ValueError, r"slot 1 of layers\[1\].slots must be below 1"),
    (Laid((Layer(4, 1), Layer(1, 1, (1,)))), ValueError, r"slot 1 of layers\[1\].slots must be below 1"),
    (Laid((Layer(2, 2, (0, 0)),)), ValueError, "must not occur twice"),
    (Laid((Layer(4, 4, (0, 1, 2, 3)),), 4), ValueError, r"Laid.plan\(3\) has 5 nodes.*must raise ValueError"),
    (Laid(TWO), TypeError, "Laid.plan must return a Plan whose layers are a tuple"),
    (Laid((TWO, [1])), TypeError, "fields of Laid must be hashable"),
]  # fmt: skip


@pytest.mark.parametrize(("growth", "error", "message"), WRONG)
def test_a_wrong_plan_is_refused_by_class_and_field(growth: Laid, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checked_plan(growth, 3)
    assert checked_plan(Laid((TWO,)), 3).num_nodes == 2


def test_slots_are_a_tuple_of_the_layers_width() -> None:
    with pytest.raises(TypeError, match=r"Layer\.slots must be a tuple"):
        Layer(2, 2, [0, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Layer\.width must be the number of slots, 2, got 4"):
        Layer(4, 4, (0, 1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layer(-1, 2), ValueError, "width must be"),
        (lambda: Layer(2, cast(Any, 1.5)), TypeError, "ranks must be an integer"),
        (
            lambda: Plan((TWO,), 2, drawing=cast(Any, "topk")),
            ValueError,
            "drawing must be one of distinct, independent, top, got",
        ),
        (lambda: Plan((TWO,), 2, threshold=float("nan")), ValueError, "threshold must be finite, got nan"),
    ],
)
def test_sizes_and_words_of_a_plan_are_checked(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


class Learning(AcceptanceModel):
    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        self.count = ratios.sum()


def test_a_model_that_learns_must_give_its_rows_to_other_texts() -> None:
    model = StoppedModel(Learning(), Stop())
    with pytest.raises(NotImplementedError, match=r"Learning learns from texts: .* it needs reset\(row\)"):
        model.reset(0)
    with pytest.raises(NotImplementedError, match=r"it needs select\(rows\)"):
        model.select(torch.tensor([0]))
    assert (plain := AcceptanceModel()).select(torch.tensor([0])) is plain
    with pytest.raises(NotImplementedError, match="Learning must implement rate"):
        Learning().rate(None)  # type: ignore[arg-type]


def test_a_growth_that_is_no_dataclass_is_named() -> None:
    with pytest.raises(TypeError, match=r"Undeclared must be a frozen dataclass"):
        check_growth(Undeclared(2))
    with pytest.raises(ValueError, match="ranks must be at most 64 for enumeration, growth Laid has 100"):
        check_growth(Laid((Layer(2, 100),)), budget=3)


def test_a_check_of_too_many_outcomes_says_which_budget_is_feasible(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Drafting, budget: int, targets: Any, seed: int) -> None:
        if budget > 2:
            raise TooManyOutcomes("many")

    monkeypatch.setattr(Drafting, "check_step", step)
    with pytest.raises(ValueError, match=r"budget 3 of growth Calibrated: many; budget=2 is feasible"):
        check_growth(Calibrated(depth=1), budget=3, seeds=[0])
