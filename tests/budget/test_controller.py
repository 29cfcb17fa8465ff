"""The budget controller on replayed steps: near the best fixed size, and never far below plain decoding."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from stree.budget.controller import BudgetController
from stree.budget.goodput import Experience, StepMs
from stree.budget.tree_sizes import Choice, flat_choices, layered_choices

PLAIN = Choice(1, 0)
LARGEST, DEEPEST = 64, 16
Step = tuple[np.ndarray, np.ndarray, np.ndarray]


def grown_row(agreement: float, rng: np.random.Generator) -> list[tuple[float, int, bool]]:
    """Grow 64 nodes best first; a child is accepted with the probability that its value states."""
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
    """Cut a step to a smaller tree size."""
    values, depths, is_accepted = step
    keep = (np.arange(LARGEST) < choice.nodes) & (depths <= choice.depth)
    return np.where(keep, values, 0.0), np.where(keep, depths, 0), is_accepted & keep


def means(choices: Sequence[Choice], steps: list[Step]) -> dict[Choice, float]:
    """Mean number of tokens that a step of every size emits."""
    return {choice: float(np.mean([cut(step, choice)[2].sum() for step in steps])) for choice in choices}


def replay(controller: BudgetController, steps: list[Step], ms: StepMs, count: int, seed: int) -> tuple[float, float]:
    """Run the controller for ``count`` tokens per sequence; return tokens and time, by the means of each size."""
    rng = np.random.default_rng(seed)
    mean = means(controller.choices, steps)
    tokens = time = 0.0
    while tokens < count * len(steps[0][0]):
        step, choice = steps[rng.integers(len(steps))], controller.choose()
        values, depths, is_accepted = cut(step, choice)
        tokens, time = tokens + mean[choice], time + size_ms(ms, choice)
        if choice == PLAIN:
            controller.observe_plain()
        else:
            controller.observe(choice, values, depths, is_accepted)
    return tokens, time


def size_ms(ms: StepMs, choice: Choice) -> float:
    return float(ms(np.array(choice.nodes), np.array(choice.depth)))


COSTS: dict[str, Callable[[int], StepMs]] = {
    "cheap-verify": lambda batch: lambda nodes, depth: 10 + 0.02 * batch * nodes + 0.5 * depth,
    "slow-verify": lambda batch: lambda nodes, depth: 10 + 2.0 * batch * (nodes - 1) + 0.5 * depth,
    "slow-draft": lambda batch: lambda nodes, depth: 10 + 0.02 * batch * nodes + 6 * depth,
    "cpu": lambda batch: lambda nodes, depth: 10 + 0.4 * batch * (nodes - 1) + 2.5 * depth,
}


@pytest.mark.parametrize(("agreement", "batch"), [(0.7, 1), (0.7, 8), (0.05, 1)], ids=["good", "batch", "useless"])
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_near_the_best_fixed_size_and_not_below_plain(cost: str, agreement: float, batch: int) -> None:
    ms = COSTS[cost](batch)
    steps = recorded_steps(agreement, batch, 200 if batch == 1 else 40, seed=1)
    choices = layered_choices(LARGEST, 8)
    runs = [replay(BudgetController(choices, ms, is_padded=True), steps, ms, 2500, seed) for seed in (2, 3)]
    reached = sum(tokens for tokens, _ in runs) / sum(time for _, time in runs)
    fixed = {choice: mean / size_ms(ms, choice) for choice, mean in means(choices, steps).items()}
    assert reached >= 0.97 * max(fixed.values())
    assert reached >= 0.97 * fixed[PLAIN]


@pytest.mark.parametrize("agreement", [0.4, 0.05])
def test_a_short_text_loses_little_where_drafting_does_not_pay(agreement: float) -> None:
    node_ms, steps = 2.0, recorded_steps(agreement, 1, 200, seed=1)
    choices = layered_choices(LARGEST, 8)
    mean = means(choices, steps)

    def tree(nodes: np.ndarray, depth: np.ndarray) -> np.ndarray:
        return 10 + node_ms * (nodes - 1) + 2.0 * depth

    # The best tree is worth 0.9 of plain decoding.
    best = max(mean[choice] / size_ms(tree, choice) for choice in choices[1:])
    plain_ms = 0.9 / best

    def ms(nodes: np.ndarray, depth: np.ndarray) -> np.ndarray:
        return np.where(nodes == 1, plain_ms, tree(nodes, depth))

    times = []
    for seed in range(20):
        controller = BudgetController(choices, ms, is_padded=True)
        tokens, time = replay(controller, steps, ms, 128, seed)
        times.append(time / tokens)
    assert np.mean(times) < 1.015 * plain_ms


def test_the_first_size_follows_the_experience_from_other_texts() -> None:
    choices = layered_choices(LARGEST, 8)

    def experience(agreement: float) -> Experience:
        controller = BudgetController(choices, lambda nodes, depth: 1.0 + 0.0 * nodes)
        for step in recorded_steps(agreement, 1, 40, seed=3):
            values, depths, is_accepted = cut(step, Choice(64, 8))
            is_accepted[:, 1:] &= agreement > 0
            controller.observe(Choice(64, 8), values, depths, is_accepted)
        return controller.experience()

    def begun(agreement: float, ms: StepMs) -> BudgetController:
        return BudgetController(choices, ms, experience=experience(agreement))

    mean = means(choices, recorded_steps(0.7, 1, 200, seed=1))
    for share, pays in ((0.7, True), (1.3, False)):  # what the best tree takes of what plain decoding takes for as much

        def ms(nodes: np.ndarray, depth: np.ndarray, share: float = share) -> np.ndarray:
            tree = share * mean[Choice(16, 4)] + 0.05 * (nodes - 16) + 0.2 * (depth - 4)
            return np.where(nodes == 1, 1.0, np.maximum(tree, 1.6))

        good = begun(0.7, ms)
        assert (good.choose() != PLAIN) == pays
        if pays:
            best = max(choices, key=lambda choice: mean[choice] / size_ms(ms, choice))
            reached = mean[good.choose()] / size_ms(ms, good.choose())
            assert reached >= 0.85 * mean[best] / size_ms(ms, best)
        useless = begun(0.0, ms)
        plain = 0
        while useless.choose() == PLAIN and plain < 1000:
            useless.observe_plain()
            plain += 1
        assert plain >= 100, "a draft model's prompt is paid for first"
        assert plain < 1000, "and it is tried in the end"


def test_the_controller_follows_a_drafter_that_becomes_useless_and_recovers() -> None:
    def ms(nodes: np.ndarray, depth: np.ndarray) -> np.ndarray:
        return 10 + 0.5 * (nodes - 1) + 1.0 * depth

    good, bad = recorded_steps(0.8, 1, 200, seed=5), recorded_steps(0.0, 1, 200, seed=6)
    for step in bad:
        step[2][:, 1:] = False
    controller = BudgetController(layered_choices(16, 4), ms)
    replay(controller, good, ms, 1000, seed=7)
    assert controller.choose().nodes > 1
    replay(controller, bad, ms, 1500, seed=8)
    assert [controller.choose() for _ in range(10)].count(PLAIN) >= 9, "off, but for a trial"
    replay(controller, good, ms, 3000, seed=9)
    assert controller.choose().nodes > 1


def off_controller(ms: StepMs, behind_ms: float = 0.0) -> BudgetController:
    """A controller that has learned that drafting does not pay."""
    steps = recorded_steps(0.0, 1, 50, seed=13)
    for step in steps:
        step[2][:, 1:] = False
    controller = BudgetController(layered_choices(16, 4), ms, behind_ms=behind_ms)
    replay(controller, steps, ms, 200, seed=14)
    assert controller.best == PLAIN
    return controller


@pytest.mark.parametrize("behind_ms", [0.0, 40.0])
def test_trials_cost_no_more_than_their_share(behind_ms: float) -> None:
    # With behind_ms the draft model first catches up with the tokens emitted since the last trial.
    def ms(nodes: np.ndarray, depth: np.ndarray) -> np.ndarray:
        return np.asarray(9.0 + nodes + depth)

    controller = off_controller(ms, behind_ms)
    plain = lost = 0.0
    for _ in range(8000):
        choice = controller.choose()
        if choice == PLAIN:
            controller.observe_plain()
            plain += 10.0
        else:
            values = np.array([[1.0] + [0.1] * (choice.nodes - 1)])
            depths = np.array([[0] + [1] * (choice.nodes - 1)])
            controller.observe(choice, values, depths, np.arange(choice.nodes)[None] < 1)
            lost += behind_ms + size_ms(ms, choice) - 10.0
    assert 0 < lost < 0.012 * plain


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
        BudgetController(sizes[1:], lambda nodes, depth: 1.0 + 0.0 * nodes)
    with pytest.raises(ValueError, match="choices must differ and begin with plain decoding"):
        BudgetController([*sizes, sizes[1]], lambda nodes, depth: 1.0 + 0.0 * nodes)
    with pytest.raises(ValueError, match=r"every time must be positive, got 0\.0"):
        BudgetController(sizes, lambda nodes, depth: 0.0 * nodes + depth)
    with pytest.raises(ValueError, match="memory must be at least 1 step, got 0"):
        BudgetController(sizes, lambda nodes, depth: 1.0 + 0.0 * nodes, memory=0)
    with pytest.raises(ValueError, match=r"probe_share and margin must be in \[0, 1\), got 1 and 0\.01"):
        BudgetController(sizes, lambda nodes, depth: 1.0 + 0.0 * nodes, probe_share=1)
