"""Tree sizes for requests in simulated worlds of known step times and acceptance."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from helpers.fast_cases import slow_unless

from benchmarks.studies.smartspec import MACHINES, POLICIES, RATES, run
from stree.budget.latency import StepLatency
from stree.budget.request_sizes import GAIN, SIZES, ActiveRequest, RequestSizes, StepHistory

TIMES = {1: 1.0, 8: 1.6, 16: 2.0, 32: 3.0, 64: 5.0}  # of a CPU, in plain steps
GPU_TIMES = {1: 1.0, 8: 1.25, 16: 1.3, 32: 1.4, 64: 1.5}


class Named:
    """What names a request."""


class World:
    """Steps of some requests whose accepted nodes scatter around their levels, and whose times scatter by a tenth."""

    def __init__(self, times: dict[int, float], levels: list[float], history: StepHistory | None = None) -> None:
        self.times, self.levels, self.random = times, levels, random.Random(0)
        self.requests = [ActiveRequest(Named(), 100) for _ in levels]
        self.chooser = RequestSizes(SIZES, history or StepHistory())
        self.chosen: list[list[int]] = []
        self.tokens = self.seconds = 0.0

    def run(self, steps: int) -> World:
        for _ in range(steps):
            sizes = self.chooser.choose(self.requests)
            means = [level * GAIN[size] for level, size in zip(self.levels, sizes, strict=True)]
            counts = [1 + min(int(self.random.expovariate(1 / mean) + 0.5), 15) if mean else 1 for mean in means]
            slow = self.random.uniform(0.9, 1.1) * (5 if self.random.random() < 0.02 else 1)
            seconds = self.times[max(sizes)] * slow
            self.chooser.observe(self.requests, sizes, counts, seconds)
            self.chosen.append(sizes)
            self.tokens, self.seconds = self.tokens + sum(counts), self.seconds + seconds
        return self


@pytest.mark.parametrize(("times", "level"), [(TIMES, 3.0), (TIMES, 0.2), (GPU_TIMES, 2.5)], ids=["cpu", "off", "gpu"])
def test_most_steps_have_the_best_size_or_one_nearly_as_good(times: dict[int, float], level: float) -> None:
    goodput = {size: (1 + level * GAIN[size]) / times[size] for size in SIZES}
    world = World(times, [level]).run(400)
    good = sum(goodput[size] > 0.9 * max(goodput.values()) for (size,) in world.chosen)
    assert good > 0.85 * len(world.chosen)


def test_where_trees_do_not_pay_little_time_is_lost() -> None:
    world = World(TIMES, [0.1]).run(500)
    assert world.tokens / world.seconds > 0.95 / 1.08, "slow steps alone take 8 %"


def test_a_text_whose_acceptance_changes_turns_drafting_on_and_off() -> None:
    world = World(TIMES, [0.05]).run(100)
    assert world.chosen[-40:].count([1]) > 30
    world.levels = [5.0]
    world.run(600)
    assert world.chosen[-40:].count([1]) < 10
    world.levels = [0.0]
    world.run(300)
    assert world.chosen[-40:].count([1]) > 30


def test_a_batch_holds_plain_requests_beside_others_with_trees() -> None:
    world = World(GPU_TIMES, [4.0, 4.0, 0.0]).run(200)
    last = Counter(tuple(sizes) for sizes in world.chosen[-50:])
    (wide, _, plain), _ = last.most_common(1)[0]
    assert wide >= 16 and plain == 1
    assert all(sizes[0] > 1 for sizes in world.chosen[-50:])


def test_a_request_keeps_to_its_own_bound_and_others_do_not() -> None:
    world = World(GPU_TIMES, [4.0, 4.0])
    world.requests[1] = world.requests[1]._replace(most_nodes=1)
    world.run(60)
    assert all(sizes[1] == 1 for sizes in world.chosen) and max(sizes[0] for sizes in world.chosen) > 1


def test_sizes_do_not_depend_on_what_the_present_step_emits() -> None:
    worlds = [World(TIMES, [1.0, 3.0]).run(30) for _ in range(2)]
    for world, count in zip(worlds, (1, 9), strict=True):
        sizes = world.chooser.choose(world.requests)
        assert sizes == worlds[0].chooser.choose(worlds[0].requests) or world is worlds[0]
        world.chooser.observe(world.requests, sizes, [count, count], 1.0)
    levels = [[world.chooser._history.each[r.name].mean for r in world.requests] for world in worlds]
    assert levels[0] != levels[1], "negative control: later steps do know it"


def test_requests_that_join_and_leave_are_forgotten() -> None:
    world = World(TIMES, [1.0, 1.0]).run(10)
    history = world.chooser._history
    world.requests[0] = ActiveRequest(Named(), 5)
    world.run(10)
    assert len(history.each) == 2


def test_latency_is_fitted_over_batches_and_sizes_that_were_never_seen_together() -> None:
    def truth(rows: int, nodes: int, context: int) -> float:
        return 3.0 + 0.5 * rows + 0.2 * rows * nodes + 4.0 * (nodes > 1) + 0.001 * context

    chance, latency = random.Random(0), StepLatency()
    assert latency.seconds(1, 16, 0) is None and not latency.has_timed(drafts=True)
    for _ in range(400):
        rows, nodes, context = chance.choice([1, 2, 8]), chance.choice([1, 8, 32]), chance.randrange(4000)
        latency.observe(rows, nodes, context, truth(rows, nodes, context) * chance.uniform(0.95, 1.05))
    assert latency.seconds(16, 64, 0) is None, "far from all that was timed"
    for rows, nodes, context in ((4, 16, 1000), (5, 64, 0), (3, 1, 2000)):
        predicted = latency.seconds(rows, nodes, context)
        assert predicted is not None and abs(predicted / truth(rows, nodes, context) - 1) < 0.1


@pytest.mark.parametrize("machine", slow_unless(("cpu").__eq__, [*MACHINES]))
def test_under_load_latency_is_near_the_best_of_plain_and_fixed_sizes(machine: str) -> None:
    for rate in (RATES[0], RATES[-1]):
        latency = {
            name: sum(run(make(), MACHINES[machine], rate, seed, 60)[0] for seed in range(4))
            for name, make in POLICIES.items()
        }
        others = [seconds for name, seconds in latency.items() if name != "auto"]
        assert latency["auto"] < 1.08 * min(others)
        assert rate > 1 or latency["auto"] < 0.97 * latency["plain"]


def test_a_fixed_shape_is_taken_whole_or_not_at_all() -> None:
    chooser, request = RequestSizes([1, 13], StepHistory()), [ActiveRequest(Named(), 9)]
    for _ in range(60):
        (size,) = chooser.choose(request)
        assert size in (1, 13)
        chooser.observe(request, [size], [1], 3.0 if size > 1 else 1.0)
    assert chooser.choose(request) == [1] and chooser.is_plain(1)


@pytest.mark.parametrize("sizes", [[], [16], [1, 16, 8], [1, 8, 8]])
def test_sizes_that_do_not_ascend_from_plain_decoding_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="sizes must ascend from 1"):
        RequestSizes(sizes, StepHistory())
