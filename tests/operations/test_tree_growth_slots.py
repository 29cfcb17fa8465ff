"""Slots chosen compiled for the CPU and in Triton equal those chosen in torch; which implementation is called.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_slots.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.growth_problems import DEVICE, KINDS, Ranked, relative_values, some_children, some_table, some_values
from helpers.on_device import treat_as_on_device
from torch import Tensor

pytest.importorskip("triton")

from stree.kernels.tree_growth import api, cpu, cpu_ratings, reference, slots_kernel
from stree.kernels.tree_growth.operands import Memory, Terms

CPU = torch.device("cpu")
Choose = Callable[[Tensor, Tensor | None, Tensor | None, Terms], tuple[Tensor, Tensor]]
Backend = tuple[Any, torch.device]  # owner of `choose`, and where its tensors are
COMPILED, TRITON = (cpu, CPU), (slots_kernel, DEVICE)
every_backend = pytest.mark.parametrize("backend", [COMPILED, TRITON], ids=["compiled", "triton"])


def check_choice(
    backend: Backend, value: Tensor, left: Any, below: Tensor | None, terms: Terms, choose: Choose = reference.choose
) -> Tensor:
    """Require the very slots of the reference, where the CPU also takes float64; return which are taken."""
    owner, device = backend
    left = None if left is None else torch.as_tensor(left, device=device)
    below = None if below is None else below.to(device)
    for dtype in (torch.float64, torch.float32) if device.type == "cpu" and owner is cpu else (torch.float32,):
        given = value.to(device, dtype)
        expected = choose(given.contiguous(), left, None if below is None else below.contiguous(), terms)
        found: tuple[Tensor, Tensor] = owner.choose(given, left, below, terms)
        assert [part.dtype for part in found] == [torch.long, torch.bool]
        assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])
    return found[1]


@every_backend
@pytest.mark.parametrize(
    ("batch", "slots", "width", "kind"),
    slow_unless(
        lambda *case: case[1] == 10 and case[3] not in ("tiny", "zeros"),
        [
            *((3, 10, 4, kind) for kind in KINDS),
            *((1, 1, 1, "random"), (1, 24, 15, "ties"), (2, 40, 9, "few"), (1, 17, 64, "tiny")),
        ],
    ),
)
def test_the_slots_chosen_are_those_of_a_stable_sort(
    batch: int, slots: int, width: int, kind: str, backend: Backend
) -> None:
    value = some_values(kind, batch, slots, seed=slots, device=CPU)
    for number, (left, layers_left) in enumerate(((0, 1), (width // 2, 2), (width, 3), (999, 1))):
        lefts = (torch.full((batch,), left) - torch.arange(batch)).clamp(min=0)
        terms = Terms(width, 0.3, layers_left)
        check_choice(backend, value, lefts, None, terms)
        check_choice(backend, value, lefts, relative_values(width, number, CPU), terms)
    check_choice(backend, value, None, None, terms)


def test_the_slots_of_a_large_layer_are_those_of_a_stable_sort() -> None:
    value = some_values("ties", 1, 378, seed=5)
    for left, below in ((50, relative_values(63, 3)), (70, None)):
        check_choice(TRITON, value, [left], below, Terms(63, 0.3, 2))


@every_backend
@pytest.mark.slow
def test_what_is_worth_exactly_as_much_counts_and_a_value_equal_to_the_threshold_is_taken(backend: Backend) -> None:
    below = torch.tensor([0.125, 0.25, 0.25, 0.5, 1.0])
    value = torch.tensor([[1.0, 0.5, 0.25, 0.25, 0.125, 0.0625]])
    taken = set()
    for left in (0, 1, 2, 4, 6, 9, 13, 18, 24):
        for given in (below, below[:0], None):
            taken.add(int(check_choice(backend, value, [left], given, Terms(6, 0.25, 99)).sum()))
    assert {0, 1, 6} <= taken
    assert check_choice(backend, value, [9], None, Terms(6, 0.25, 99)).tolist() == [[True] * 4 + [False] * 2]
    for threshold in (0.7, 0.3):  # which float32 rounds down and up
        check_choice(backend, torch.tensor([[0.9, threshold, 0.2]]), [3], None, Terms(3, threshold, 99))


@every_backend
def test_a_layer_takes_its_share_of_the_nodes_left_though_they_are_below_the_threshold(backend: Backend) -> None:
    value = torch.tensor([[0.9, 0.2, 0.1, 0.05]])
    assert check_choice(backend, value, [4], None, Terms(4, 0.3, 2)).tolist() == [[True, True, False, False]]


@every_backend
def test_a_choice_reads_values_of_any_stride_and_integers_of_any_width(backend: Backend) -> None:
    value, below = some_values("ties", 3, 12, seed=1, device=CPU), relative_values(8, 2, CPU)
    left, terms = torch.tensor([5, 2, 9]), Terms(8, 0.3, 2)
    for given in (value.T.contiguous().T, torch.cat([value, value + 1], 1)[:, :12]):
        check_choice(backend, given, torch.stack([left, left + 1], 1)[:, 0], below, terms)
        if backend is COMPILED:
            check_choice(backend, given, left.int(), below.double(), terms)
            check_choice(backend, given, left, torch.stack([below, below * 0], 1)[:, 0], terms)


@every_backend
def test_shares_are_rounded_as_in_torch_before_they_are_compared(backend: Backend) -> None:
    value = torch.rand(1, 6, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    below = (value[0] / value[0, :, None]).triu(1).flatten().unique()[1:]  # every share once
    for left in range(0, 45, 4):
        check_choice(backend, value, [left], below, Terms(6, 0.3, 1))


def test_values_that_are_hardly_numbers_and_none_at_all_are_chosen_from_as_in_torch() -> None:
    # A share of what is below 1e-38 is taken of 1e-38, in float64 too.
    value, below = torch.tensor([[1e-37, 1e-38, 3e-39, 3e-39, 1e-39, 1e-40]]), torch.tensor([0.05, 0.2, 0.9])
    for left in range(20):
        check_choice(COMPILED, value, [left], below, Terms(6, 0.3, 1))
    for value, width in ((torch.rand(0, 4), 3), (torch.rand(2, 4), 0)):
        check_choice(COMPILED, value, [3] * len(value), relative_values(4, 1, CPU), Terms(width, 0.3, 1))


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
    given = some_values("ties", 3, 24, 0, CPU), [14, 9, 20], relative_values(15, 3, CPU), Terms(15, 0.3, 2)
    check_choice(COMPILED, *given)
    with pytest.raises(AssertionError):
        check_choice(COMPILED, *given, WRONG_CHOICES[control])


# Which implementation is called.


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List which implementation serves each operation, by the size of what it is given."""
    asked: list[str] = []
    names = ("choose", "rate_by_table", "rate_by_rank", "remember")
    for owner, by in ((cpu, "cpu"), (cpu_ratings, "cpu"), (slots_kernel, "triton"), (reference, "torch")):
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, lambda *_, word=f"{name} {by}": asked.append(word))
    table, children, small = some_table(1, 4, 0, CPU), some_children(1, 3, 4, 0, CPU), torch.rand(1, 8)
    ranked, memory = Ranked.draw(1, 3, 4, 0, CPU), Memory.empty(1, CPU)
    asked.clear()
    terms = Terms(4, 0.0, 1)
    api.choose(small, None, None, terms)
    api.choose(torch.rand(1, api.MOST_COMPARED), None, None, terms)
    api.choose(small.double(), None, None, terms)
    api.choose(torch.rand(1, api.MAX_WIDTH + 9), None, None, replace(terms, width=api.MAX_WIDTH + 1))
    api.choose(small, torch.ones(1, dtype=torch.long), torch.rand(api.MAX_BELOW + 1).sort().values, terms)
    api.rate_by_table(table, children)
    api.rate_by_rank(*ranked)
    api.remember(memory, torch.zeros(1, 1).long(), None, torch.ones(1).int())
    return asked


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is simulated on the CPU")
def test_the_api_calls_the_compiled_code_on_the_cpu_kernels_on_a_gpu_and_torch_where_neither_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rated = "rate_by_table", "rate_by_rank", "remember"
    with monkeypatch.context() as patch:
        found = calls(patch)
    assert found[:5] == ["choose cpu", "choose torch", *["choose cpu"] * 3]
    assert found[5:] == [f"{name} cpu" for name in rated]
    with monkeypatch.context() as patch:
        treat_as_on_device(patch)
        assert calls(patch) == ["choose torch"] * 5 + [f"{name} torch" for name in rated]
    with monkeypatch.context() as patch:
        treat_as_on_device(patch, triton=True)
        found = calls(patch)
    assert found[:5] == ["choose triton", *["choose torch"] * 4]
    assert found[5:] == ["rate_by_table triton", "rate_by_rank triton", "remember torch"]
