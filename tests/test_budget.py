"""The budget controller on replayed steps: near the best fixed size found by search, and never far below plain.

Run: python -m pytest tests/test_budget.py
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import pytest

from stree.budget import LOOK, BudgetController, Choice, flat_choices, layered_choices

PLAIN = Choice(1, 0)
LARGEST, DEEPEST = 64, 16
Step = tuple[np.ndarray, np.ndarray, np.ndarray]


def grown_row(agreement: float, rng: np.random.Generator) -> list[tuple[float, int, bool]]:
    """Grow 64 nodes best first; each node's children are right with the probabilities that its values promise."""
    share = float(np.clip(agreement + 0.2 * rng.standard_normal(), 0.02, 0.98))
    probs = (share, (1 - share) * 0.4, (1 - share) * 0.2)
    nodes: list[tuple[float, int, bool]] = [(1.0, 0, True)]
    heap: list[tuple[float, int, int, int, bool]] = []

    def offer(node: int) -> None:
        value, depth, is_right = nodes[node]
        draw, total = rng.random(), 0.0
        for rank, prob in enumerate(probs if depth < DEEPEST else ()):
            hit, total = total <= draw < total + prob, total + prob
            heapq.heappush(heap, (-value * prob, node, rank, depth + 1, is_right and hit))

    offer(0)
    while len(nodes) < LARGEST:
        value, _, _, depth, is_right = heapq.heappop(heap)
        nodes.append((-value, depth, is_right))
        offer(len(nodes) - 1)
    return nodes


def recorded_steps(agreement: float, batch: int, count: int, seed: int) -> list[Step]:
    rng = np.random.default_rng(seed)
    rows = [[grown_row(agreement, rng) for _ in range(batch)] for _ in range(count)]
    return [
        (
            np.array([[node[0] for node in row] for row in step]),
            np.array([[node[1] for node in row] for row in step]),
            np.array([[node[2] for node in row] for row in step]),
        )
        for step in rows
    ]


def cut(step: Step, choice: Choice) -> Step:
    """Give what a tree of this size would have been."""
    values, depths, is_accepted = step
    keep = (np.arange(LARGEST) < choice.nodes) & (depths <= choice.depth)
    return np.where(keep, values, 0.0), np.where(keep, depths, 0), is_accepted & keep


def replay(
    controller: BudgetController, steps: list[Step], ms: Callable[[Choice], float], count: int, seed: int
) -> float:
    """Run the controller on recorded steps; return tokens a millisecond, every step counted as its size's mean."""
    rng = np.random.default_rng(seed)
    mean = {choice: float(np.mean([cut(step, choice)[2].sum() for step in steps])) for choice in controller.choices}
    tokens = time = 0.0
    for _ in range(count):
        step, choice = steps[rng.integers(len(steps))], controller.choose()
        values, depths, is_accepted = cut(step, choice)
        tokens, time = tokens + mean[choice], time + ms(choice)
        if choice == PLAIN:
            controller.observe_plain()
        else:
            controller.observe(choice, values, depths, is_accepted)
    return tokens / time


COSTS: dict[str, Callable[[int], Callable[[Choice], float]]] = {
    "cheap-verify": lambda batch: lambda c: 10 + 0.02 * batch * c.nodes + 0.5 * c.depth,
    "dear-verify": lambda batch: lambda c: 10 + 2.0 * batch * (c.nodes - 1) + 0.5 * c.depth,
    "dear-draft": lambda batch: lambda c: 10 + 0.02 * batch * c.nodes + 6 * c.depth,
    "cpu": lambda batch: lambda c: 10 + 0.4 * batch * (c.nodes - 1) + 2.5 * c.depth,
}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("agreement", [0.7, 0.05], ids=["good-drafter", "useless-drafter"])
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_near_the_best_fixed_size_and_not_below_plain(cost: str, agreement: float, batch: int) -> None:
    ms = COSTS[cost](batch)
    steps = recorded_steps(agreement, batch, 200 if batch == 1 else 40, seed=1)
    controller = BudgetController(layered_choices(LARGEST, 8), ms)
    reached = replay(controller, steps, ms, 1500, seed=2)
    fixed = {
        choice: float(np.mean([cut(step, choice)[2].sum() for step in steps])) / ms(choice)
        for choice in controller.choices
    }
    assert reached >= 0.97 * max(fixed.values())
    assert reached >= 0.97 * fixed[PLAIN]


def test_a_wrong_cost_table_is_corrected_by_what_steps_take() -> None:
    def truth(choice: Choice) -> float:
        return 10 + 3.0 * (choice.nodes - 1)

    steps = recorded_steps(0.3, 1, 200, seed=3)
    controller = BudgetController(layered_choices(16, 4), lambda choice: 1.0)
    replay(controller, steps, truth, 1500, seed=4)
    last = [controller.choose() for _ in range(20)]
    assert max(choice.nodes for choice in last) <= 3, "large trees were found to be dear"


def test_the_controller_follows_a_drafter_that_becomes_useless_and_recovers() -> None:
    def ms(choice: Choice) -> float:
        return 10 + 0.5 * (choice.nodes - 1) + 1.0 * choice.depth

    good, bad = recorded_steps(0.8, 1, 200, seed=5), recorded_steps(0.0, 1, 200, seed=6)
    for step in bad:
        step[2][:, 1:] = False
    controller = BudgetController(layered_choices(16, 4), ms)
    replay(controller, good, ms, 400, seed=7)
    assert controller.choose().nodes > 1
    replay(controller, bad, ms, 1500, seed=8)
    assert [controller.choose() for _ in range(10)].count(PLAIN) >= 9, "off, but for a trial"
    replay(controller, good, ms, 3000, seed=9)
    assert controller.choose().nodes > 1


def test_a_step_teaches_what_smaller_trees_would_have_emitted() -> None:
    controller = BudgetController(layered_choices(4, 3), lambda choice: 1.0, memory=10**9)
    # Root, two children, a grandchild below the better one: accepted are the root, that child and the grandchild.
    values = np.array([[1.0, 0.3, 0.6, 0.5]])
    depths = np.array([[0, 1, 1, 2]])
    controller.observe(Choice(4, 3), values, depths, np.array([[True, False, True, True]]))
    emitted = dict(zip(controller.choices, controller._emitted - np.eye(len(controller.choices))[0], strict=True))
    assert emitted[PLAIN] == pytest.approx(1)
    assert emitted[Choice(2, 1)] == pytest.approx(2)
    assert emitted[Choice(3, 1)] == pytest.approx(2), "the grandchild is deeper"
    assert emitted[Choice(3, 2)] == pytest.approx(3)
    assert emitted[Choice(4, 3)] == pytest.approx(3)
    controller.observe(Choice(4, 3), values, depths, np.zeros((1, 4), dtype=bool))
    assert controller._emitted[0] == pytest.approx(2), "a sequence that stood still teaches nothing"


def test_one_slow_step_is_soon_forgotten() -> None:
    steps = recorded_steps(0.7, 1, 100, seed=10)

    def ms(choice: Choice) -> float:
        return 10.0 + 0.01 * choice.nodes

    controller = BudgetController(layered_choices(8, 3), ms)
    replay(controller, steps, ms, 400, seed=11)
    used = controller.choices[controller._current]
    assert used.nodes >= 6
    controller.observe(used, *cut(steps[0], used), 1e6)
    assert controller.choices[controller._current].nodes > 1, "decoding is not given up for one slow step"
    replay(controller, steps, ms, 60, seed=12)
    assert controller.choices[controller._current].nodes >= 6


def off_controller(ms: Callable[[Choice], float]) -> BudgetController:
    """Give a controller that has learnt that drafting is of no use."""
    steps = recorded_steps(0.0, 1, 50, seed=13)
    for step in steps:
        step[2][:, 1:] = False
    controller = BudgetController(layered_choices(16, 4), ms)
    replay(controller, steps, ms, 200, seed=14)
    assert controller.best == PLAIN
    return controller


def test_steps_of_plain_decoding_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, looks = off_controller(lambda choice: 10.0 + choice.nodes + choice.depth), 0
    settle = BudgetController._settle

    def counted(self: BudgetController) -> None:
        nonlocal looks
        looks += 1
        settle(self)

    monkeypatch.setattr(BudgetController, "_settle", counted)
    trials: list[None] = []
    monkeypatch.setattr(BudgetController, "_trial", lambda self, ms: trials.append(None))
    controller._credit = controller._wanted = 0.0  # a trial may be thought about at every look
    for _ in range(320):
        assert controller.choose() == PLAIN
        controller.observe_plain(11.0)
    assert 0 < looks <= 320 // LOOK and len(trials) <= 1 + 320 // LOOK


@pytest.mark.parametrize("excess", [1.0, 10.0], ids=["as-predicted", "ten-times"])
def test_trials_cost_no_more_than_their_share_however_long_they_take(excess: float) -> None:
    # A trial runs the prompt through the draft model, or all that was emitted since the last one.
    def ms(choice: Choice) -> float:
        return 10.0 + choice.nodes + choice.depth

    controller = off_controller(ms)
    plain = lost = 0.0
    for _ in range(4000):
        choice = controller.choose()
        if choice == PLAIN:
            controller.observe_plain(11.0)
            plain += 11.0
        else:
            took = excess * ms(choice)
            values = np.array([[1.0] + [0.1] * (choice.nodes - 1)])
            depths = np.array([[0] + [1] * (choice.nodes - 1)])
            controller.observe(choice, values, depths, np.arange(choice.nodes)[None] < 1, took)
            lost += took - 11.0
    assert 0 < lost < 0.012 * plain


def test_a_machine_that_slows_down_is_no_reason_to_draft_less() -> None:
    controller = BudgetController(layered_choices(8, 3), lambda choice: 10.0 + choice.nodes)
    steps = recorded_steps(0.7, 1, 100, seed=15)
    replay(controller, steps, lambda choice: 10.0 + choice.nodes, 300, seed=16)
    used = controller.choices[controller._current]
    assert used != PLAIN
    before = controller._ms
    for step in steps:
        controller.observe(used, *cut(step, used), 3 * (10.0 + used.nodes))
    slower = controller._ms / before
    assert slower[controller._index[used]] > 2
    assert slower[0] == pytest.approx(slower[controller._index[used]], rel=0.05)
    assert controller.choices[controller._current] != PLAIN


def test_the_first_step_of_a_size_may_take_long() -> None:
    controller = BudgetController(layered_choices(2, 1), lambda choice: 10.0)
    for took in (1000.0, 12.0):
        controller.observe(Choice(2, 1), np.ones((1, 2)), np.array([[0, 1]]), np.ones((1, 2), dtype=bool), took)
    assert controller._ms_of(1) == pytest.approx(12.0)


def test_choices_cover_sizes_and_depths() -> None:
    assert flat_choices(1) == [PLAIN]
    assert flat_choices(7) == [PLAIN, *(Choice(nodes, nodes - 1) for nodes in (2, 3, 4, 6, 7))]
    assert layered_choices(1, 5) == [PLAIN]
    assert layered_choices(3, 9) == [PLAIN, Choice(2, 1), Choice(3, 1), Choice(3, 2)]
    assert Choice(5, 2) in layered_choices(5, 2)
    coarse = layered_choices(64, 8, is_coarse=True)
    assert coarse[0] == PLAIN and set(coarse) < set(layered_choices(64, 8)) and len(coarse) == 13
    assert Choice(4, 2) in coarse and Choice(64, 8) in coarse and Choice(6, 2) not in coarse


def test_bad_settings_are_refused() -> None:
    sizes = layered_choices(4, 2)
    with pytest.raises(ValueError, match="max_nodes and max_depth must be at least 1, got 4 and 0"):
        layered_choices(4, 0)
    with pytest.raises(ValueError, match="max_nodes must be at least 1, got 0"):
        flat_choices(0)
    with pytest.raises(ValueError, match="choices must differ and begin with plain decoding"):
        BudgetController(sizes[1:], lambda choice: 1.0)
    with pytest.raises(ValueError, match="choices must differ and begin with plain decoding"):
        BudgetController([*sizes, sizes[1]], lambda choice: 1.0)
    with pytest.raises(ValueError, match=r"every predicted time must be positive, got 0\.0"):
        BudgetController(sizes, lambda choice: choice.depth)
    with pytest.raises(ValueError, match="memory must be at least 1 step, got 0"):
        BudgetController(sizes, lambda choice: 1.0, memory=0)
    with pytest.raises(ValueError, match=r"probe_share and margin must be in \[0, 1\), got 1 and 0\.01"):
        BudgetController(sizes, lambda choice: 1.0, probe_share=1)
