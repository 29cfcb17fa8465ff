"""What a table and a level learn from a verified tree is in one launch what it is in torch.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_tree_growth_learning.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.on_device import treat_as_on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from stree.growth.learned_acceptance import SampledAcceptance
from stree.kernels.tree_growth import api, learning_kernel, reference
from stree.kernels.tree_growth.operands import Kept, Level, Table, Verdicts
from stree.kernels.tree_indices import ancestor_mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS = 3
RATIOS: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda ratios: ratios,
    "all accepted": torch.ones_like,
    "all refused": torch.zeros_like,
    "one or none": torch.round,
    "sure": lambda ratios: 1 - 1e-5 * ratios,
}


@dataclass(frozen=True)
class Step:
    """What one step teaches a table."""

    table: Table
    kept: list[Kept]
    verdicts: Verdicts

    @classmethod
    def draw(
        cls, batch: int, widths: list[int], n: int, seed: int, *, ratios: str = "random", cells: int | None = None
    ) -> Step:
        """Draw layers of some widths, of whose nodes, the root among them, ``n`` make a tree; padding among them.

        ``cells`` is how many different ones nodes share before a draw and likewise after it; None for all there are.
        """
        generator = torch.Generator().manual_seed(seed)

        def drawn(most: int, *shape: int) -> Tensor:
            return torch.randint(most, (batch, *shape), generator=generator)

        table = SampledAcceptance(batch, RANKS, DEVICE).table
        first, beyond = table.first_after, table.tests.shape[1]
        kept, above = [], 1
        for width in widths:
            before = drawn(first, above, RANKS)
            after = first + drawn(beyond - first, above, RANKS)
            if cells is not None:
                before, after = before % cells, first + after % cells
            slots = torch.rand(batch, above * RANKS, generator=generator).argsort(1)[:, :width]
            kept.append(Kept(torch.stack([before, after], -1).to(DEVICE), slots.to(DEVICE)))
            above = slots.shape[1]
        grown = 1 + sum(slots.shape[1] for _, slots in kept)
        numbers = torch.rand(batch, grown - 1, generator=generator).argsort(1)[:, : n - 1].sort(1).values + 1
        numbers = torch.nn.functional.pad(numbers, (1, 0))
        n = numbers.shape[1]
        parents = (torch.rand(batch, n, generator=generator) * torch.arange(n)).int()
        parents[:, 0] = -1
        is_dropped = drawn(5, n) == 0
        is_dropped[:, 0] = False
        parents[(ancestor_mask(parents) & is_dropped[:, None]).any(-1)] = -1
        found = RATIOS[ratios](torch.rand(batch, n + 3, generator=generator))[:, :n]
        found[parents < 0] = torch.nan  # not tested
        is_live = drawn(4) > 0
        is_live[0] = True
        verdicts = Verdicts(parents, ancestor_mask(parents), numbers, found, is_live)
        moved = {name: getattr(verdicts, name).to(DEVICE) for name in Verdicts.__slots__}
        tests = torch.rand(table.tests.shape, generator=generator).to(DEVICE)
        return cls(replace(table, tests=tests, passed=tests / 2), kept, replace(verdicts, **moved))

    def learnt(self, learn: Callable[[Table, list[Kept], Verdicts], None], dtype: torch.dtype) -> Table:
        """Give the table after what a function has learnt."""
        table = replace(self.table, **{name: getattr(self.table, name).to(dtype, copy=True) for name in SUMS})
        learn(table, self.kept, self.verdicts)
        return table


SUMS = ("tests", "passed")


def check(step: Step) -> None:
    """Compare what is learnt with the reference's in float64; every cell that is not counted stays bit for bit."""
    found = step.learnt(learning_kernel.learn, torch.float32)
    expected = step.learnt(reference.learn, torch.float64)
    for name in SUMS:
        one, other, before = (getattr(table, name) for table in (found, expected, step.table))
        assert torch.allclose(one.double(), other, rtol=1e-5, atol=2e-6), (name, (one - other).abs().max())
        untouched = other == before
        assert torch.equal(one[untouched], before[untouched])


@pytest.mark.parametrize("ratios", RATIOS)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    widths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    n=st.sampled_from([1, 2, 7, 16, 33, 128]),
    cells=st.sampled_from([None, 1, 2, 5]),
)
@settings(max_examples=6, deadline=None)
def test_what_a_tree_teaches_is_the_same(
    ratios: str, seed: int, batch: int, widths: list[int], n: int, cells: int | None
) -> None:
    check(Step.draw(batch, [*widths, 60, 60] if n == 128 else widths, n, seed, ratios=ratios, cells=cells))


def test_nodes_that_are_all_proposed_need_no_numbers() -> None:
    for seed in range(2):
        step = Step.draw(3, [3, 7, 5], 16, seed, cells=4)
        count = step.verdicts.parents.shape[1]
        assert count == 1 + sum(slots.shape[1] for _, slots in step.kept)
        numbers = torch.arange(count, device=DEVICE).expand(3, -1)
        check(replace(step, verdicts=replace(step.verdicts, numbers=None)))
        given, none = (
            replace(step, verdicts=replace(step.verdicts, numbers=one)).learnt(learning_kernel.learn, torch.float32)
            for one in (numbers, None)
        )
        assert torch.equal(given.tests, none.tests) and torch.equal(given.passed, none.passed)


@dataclass(frozen=True)
class Told:
    """What one tree teaches a level."""

    level: Level
    values: Tensor
    verdicts: Verdicts

    @classmethod
    def draw(cls, batch: int, n: int, seed: int, *, ratios: str = "one or none") -> Told:
        """Draw a tree of ``n`` nodes, padding among them, and what became of each."""
        step = Step.draw(batch, [3, 9, 27, 60, 60], n, seed, ratios=ratios)
        generator = torch.Generator().manual_seed(seed)
        chance = torch.rand(batch, n, generator=generator).to(DEVICE)
        values = torch.where(step.verdicts.mask, chance[:, None], 1.0).prod(-1) / chance[:, :1]
        values = torch.where(step.verdicts.parents < 0, 0.0, values)
        values[:, 0] = 1
        level = Level(torch.randn(batch, generator=generator), 1 + 12 * torch.rand(batch, generator=generator))
        return cls(Level(level.shift.to(DEVICE), level.weight.to(DEVICE)), values, replace(step.verdicts, numbers=None))

    def learnt(self, learn: Callable[[Level, Tensor, Verdicts], None], dtype: torch.dtype = torch.float32) -> Level:
        """Give the level after what a function has learnt; all but trees are of ``dtype``."""
        level = Level(*(tensor.to(dtype, copy=True) for tensor in (self.level.shift, self.level.weight)))
        learn(level, self.values.to(dtype), replace(self.verdicts, ratios=self.verdicts.ratios.to(dtype)))
        return level

    def by_hand(self, row: int) -> tuple[float, float]:
        """Compute one sequence's shift and weight, node after node from the root."""
        parents, values, ratios = (
            part[row].tolist() for part in (self.verdicts.parents, self.values, self.verdicts.ratios)
        )
        reached, with_child = {0: 1.0}, set()
        missing = information = 0.0
        for node, parent in enumerate(parents):
            if parent < 0:
                continue
            reached[node] = reached[parent] * max(ratios[node], 1e-6)
            if parent not in with_child:
                with_child.add(parent)
                chance = values[node] / values[parent]
                missing += reached[parent] * (ratios[node] - chance)
                information += reached[parent] * chance * (1 - chance)
        if not bool(self.verdicts.is_live[row]):
            missing = information = 0.0
        weight = min(float(self.level.weight[row]) + information, 12.0)
        return float(self.level.shift[row]) + missing / weight, weight


@pytest.mark.parametrize("learn", [learning_kernel.learn_level, reference.learn_level])
@pytest.mark.parametrize("ratios", ["one or none", "random", "all accepted"])
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 4), n=st.integers(1, 70))
@settings(max_examples=12, deadline=None)
def test_a_level_learns_what_it_does_by_hand(
    ratios: str, learn: Callable[[Level, Tensor, Verdicts], None], seed: int, batch: int, n: int
) -> None:
    told = Told.draw(batch, n, seed, ratios=ratios)
    found = told.learnt(learn)
    for row in range(batch):
        shift, weight = told.by_hand(row)
        assert float(found.shift[row]) == pytest.approx(shift, rel=1e-4, abs=1e-5)
        assert float(found.weight[row]) == pytest.approx(weight, rel=1e-5)


def test_a_level_reads_ratios_of_any_stride() -> None:
    told = Told.draw(3, 20, seed=1)
    expected = told.learnt(learning_kernel.learn_level)
    ratios = told.verdicts.ratios
    for given_ratios in (torch.cat([ratios, ratios], 1)[:, :20], ratios.T.contiguous().T):
        other = replace(told, verdicts=replace(told.verdicts, ratios=given_ratios))
        found = other.learnt(learning_kernel.learn_level)
        assert torch.equal(found.shift, expected.shift) and torch.equal(found.weight, expected.weight)


def test_float64_and_large_trees_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch, triton=True, host_can_read=True)
    asked: list[str] = []
    for name in ("learn", "learn_level"):
        monkeypatch.setattr(learning_kernel, name, lambda *_, name=name: asked.append(name))
    step, told = Step.draw(1, [3, 3], 5, seed=0), Told.draw(3, 20, seed=1)
    exact = replace(step, verdicts=replace(step.verdicts, ratios=step.verdicts.ratios.double()))
    assert torch.equal(exact.learnt(api.learn, torch.float32).tests, step.learnt(reference.learn, torch.float32).tests)
    large_step, large_told = Step.draw(1, [3, 9, 27, 60, 60], 129, seed=0), Told.draw(1, 129, seed=2)
    assert not torch.equal(large_step.learnt(api.learn, torch.float32).tests, large_step.table.tests)
    assert not torch.equal(large_told.learnt(api.learn_level).shift, large_told.level.shift)
    expected = told.learnt(reference.learn_level).shift
    assert torch.allclose(told.learnt(api.learn_level, torch.float64).shift.float(), expected, rtol=1e-4)
    assert asked == []
    step.learnt(api.learn, torch.float32)
    told.learnt(api.learn_level)
    assert asked == ["learn", "learn_level"]
