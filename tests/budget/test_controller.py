"""The budget controller in simulated worlds of known step times and acceptance."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from stree.budget.controller import GAIN, PROBE_STEPS, SIZES, AcceptanceLevel, BudgetController, StepHistory

TIMES = {1: 1.0, 8: 1.6, 16: 2.0, 32: 3.0, 64: 5.0}  # of a CPU, in plain steps
GPU_TIMES = {1: 1.0, 8: 1.25, 16: 1.3, 32: 1.4, 64: 1.5}


class World:
    """Steps whose tokens scatter around 1 + level * GAIN and whose times scatter by a tenth, with rare slow ones."""

    def __init__(self, times: dict[int, float], seed: int = 0, rows: int = 1) -> None:
        self.times, self.rows, self.random = times, rows, random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.chosen: list[int] = []

    def run(self, controller: BudgetController, level: float, steps: int) -> None:
        for _ in range(steps):
            size = controller.choose()
            mean = level * GAIN[size]
            counts = [
                1 + min(int(self.random.expovariate(1 / mean) + 0.5), 15) if mean else 1 for _ in range(self.rows)
            ]
            seconds = self.times[size] * self.random.uniform(0.9, 1.1) * (5 if self.random.random() < 0.02 else 1)
            controller.observe(size, counts, seconds)
            self.tokens += sum(counts)
            self.seconds += seconds
            self.chosen.append(size)


def best_size(times: dict[int, float], level: float) -> int:
    return max(SIZES, key=lambda size: (1 + level * GAIN[size]) / times[size])


def history(times: dict[int, float], level: float) -> StepHistory:
    """Return what a long generation of that world leaves."""
    known = StepHistory()
    World(times, seed=99).run(BudgetController(SIZES, known), level, 300)
    return known


@pytest.mark.parametrize(("times", "level"), [(TIMES, 3.0), (TIMES, 0.2), (GPU_TIMES, 2.5)], ids=["cpu", "off", "gpu"])
def test_most_steps_have_the_best_size_or_one_nearly_as_good(times: dict[int, float], level: float) -> None:
    world = World(times)
    world.run(BudgetController(SIZES, history(times, level)), level, 400)
    best = (1 + level * GAIN[best_size(times, level)]) / times[best_size(times, level)]
    good = [size for size in SIZES if (1 + level * GAIN[size]) / times[size] > 0.9 * best]
    assert sum(size in good for size in world.chosen) > 0.85 * len(world.chosen)


def test_where_trees_do_not_pay_little_time_is_lost() -> None:
    world = World(TIMES)
    world.run(BudgetController(SIZES, history(TIMES, 0.1)), 0.1, 500)
    assert world.tokens / world.seconds > 0.95 / 1.08, "slow steps alone take 8 %"


def test_a_text_that_begins_to_be_accepted_turns_drafting_on_again() -> None:
    world, controller = World(TIMES), BudgetController(SIZES, history(TIMES, 0.1))
    world.run(controller, 0.1, 60)
    assert world.chosen[-20:].count(1) > 15
    world.run(controller, 4.0, 400)
    assert controller.current > 1


def test_another_size_is_tried_for_several_steps() -> None:
    world, known = World(TIMES), history(TIMES, 0.1)
    world.run(BudgetController(SIZES, known), 0.1, 600)
    tries = [len(list(steps)) for plain, steps in groupby(world.chosen, lambda size: size == 1) if not plain]
    assert tries and set(tries) == {PROBE_STEPS}


def test_a_text_that_is_no_longer_accepted_turns_drafting_off() -> None:
    world, controller = World(TIMES), BudgetController(SIZES, history(TIMES, 3.0))
    world.run(controller, 3.0, 60)
    assert controller.current > 1
    world.run(controller, 0.0, 200)
    assert controller.current == 1


@pytest.mark.parametrize("start", [16, 8, 1])
def test_the_first_generation_times_the_sizes_up_to_its_start(start: int) -> None:
    world, known = World(TIMES), StepHistory()
    first = [size for size in (16, 8, 1) if size <= start for _ in range(3)]
    for steps in (2, len(first) - 2):  # the first text ends before all are timed, the second goes on
        world.run(BudgetController(SIZES, known, start), 3.0, steps)
    assert world.chosen == first


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", [3.0, 2.0])
def test_short_texts_that_begin_with_a_rejection_come_to_the_best_size(level: float, seed: int) -> None:
    known = StepHistory()
    first = BudgetController(SIZES, known)
    for _ in range(8):
        size = first.choose()
        first.observe(size, [1], TIMES[size])
    world = World(TIMES, seed)
    for _ in range(30):
        world.run(BudgetController(SIZES, known), level, 25)
    best = best_size(TIMES, level)
    assert world.tokens / world.seconds > 0.85 * (1 + level * GAIN[best]) / TIMES[best] / 1.08


def test_a_smaller_tree_that_pays_is_found_although_the_first_step_of_each_size_is_slow() -> None:
    times, chosen = {1: 1.0, 8: 1.5, 16: 1.85, 32: 2.9, 64: 5.0}, list[int]()
    for seed in range(10):
        known, world = StepHistory(), World({}, seed)
        for _ in range(8):  # short texts of one process
            controller = BudgetController(SIZES, known)
            for _ in range(25):
                world.times = {size: time * (1 if size in world.chosen else 1.5) for size, time in times.items()}
                world.run(controller, 1.3, 1)
        chosen += world.chosen[-100:]
    assert chosen.count(8) > 0.7 * len(chosen), "a few are misled by one slow step"


def test_a_first_generation_that_begins_with_rejections_keeps_to_a_size_that_pays() -> None:
    controller = BudgetController(SIZES, StepHistory())
    for _ in range(12):
        size = controller.choose()
        controller.observe(size, [1], TIMES[size])
    assert controller.current == 8
    for _ in range(60):
        size = controller.choose()
        controller.observe(size, [1], TIMES[size])
    assert controller.current == 1


def test_rows_of_a_batch_inform_one_level() -> None:
    world = World(TIMES, rows=8)
    world.run(BudgetController(SIZES, history(TIMES, 0.1)), 0.1, 100)
    assert world.chosen.count(1) > 80


def test_a_fixed_shape_is_taken_whole_or_not_at_all() -> None:
    controller = BudgetController([1, 13], StepHistory())
    for _ in range(60):
        size = controller.choose()
        assert size in (1, 13)
        controller.observe(size, [1], 3.0 if size > 1 else 1.0)
    assert controller.current == 1


@pytest.mark.parametrize("sizes", [[], [16], [1, 16, 8], [1, 8, 8]])
def test_sizes_that_do_not_ascend_from_plain_decoding_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes must ascend from 1"):
        BudgetController(sizes, StepHistory())


@pytest.mark.parametrize(("times", "level", "pays"), [(TIMES, 0.1, False), (GPU_TIMES, 2.5, True)], ids=["cpu", "gpu"])
def test_a_batch_begins_with_plain_decoding_and_finds_out_whether_trees_pay(
    times: dict[int, float], level: float, pays: bool
) -> None:
    world = World(times, rows=8)
    world.run(BudgetController(SIZES, StepHistory(), start=1), level, 100)
    assert world.chosen[:7] == [1] * 7
    assert (world.chosen[-40:].count(1) < 5) == pays and (world.chosen.count(1) > 90) != pays


@pytest.mark.parametrize("is_shared", [True, False])
def test_texts_whose_number_changes_keep_their_acceptance_level(is_shared: bool) -> None:
    level, world = AcceptanceLevel(), World(TIMES)
    world.run(BudgetController(SIZES, history(TIMES, 4.0), level=level), 4.0, 200)
    known = StepHistory(history(TIMES, 0.0).seconds)  # times of another number of rows, nothing of texts
    other = BudgetController(SIZES, known, 1, level if is_shared else None)
    assert (other.current > 1) == is_shared
