"""What steps of each size emit and take, by what was accepted: `stree.budget.goodput`."""

from __future__ import annotations

import numpy as np
import pytest

from stree.budget.goodput import Experience, Goodput
from stree.budget.tree_sizes import PLAIN, Choice, layered_choices

CHOICES = layered_choices(4, 3)


def estimates(choices: list[Choice], experience: Experience | None = None) -> Goodput:
    """Begin to estimate where a node takes one and a draft call ten milliseconds, and nothing fades."""
    return Goodput(choices, lambda nodes, depth: nodes + 10.0 * depth, experience, is_padded=False, memory=10**9)


def by_choice(numbers: np.ndarray) -> dict[Choice, float]:
    return dict(zip(CHOICES, numbers, strict=True))


def test_a_step_teaches_what_smaller_trees_would_have_emitted() -> None:
    known, ran = estimates(CHOICES), CHOICES.index(Choice(4, 3))
    # Root, two children, a grandchild below the better one: accepted are the root, that child and the grandchild.
    values, depths = np.array([[[1.0, 0.3, 0.6, 0.5]]]), np.array([[[0, 1, 1, 2]]])
    known.learn(ran, values, depths, np.array([[[True, False, True, True]]]))
    emitted = by_choice(known.experience().emitted - np.eye(len(CHOICES))[0])
    assert emitted[PLAIN] == pytest.approx(1)
    assert emitted[Choice(2, 1)] == pytest.approx(2)
    assert emitted[Choice(3, 1)] == pytest.approx(2), "the grandchild is deeper"
    assert emitted[Choice(3, 2)] == pytest.approx(3)
    assert emitted[Choice(4, 3)] == pytest.approx(3)
    known.learn(ran, values, depths, np.zeros((1, 1, 4), dtype=bool))
    assert known.experience().emitted[0] == pytest.approx(2), "a sequence that stood still teaches nothing"
    ms = by_choice(known.ms(ran))
    assert ms[PLAIN] == 1 and ms[Choice(3, 1)] == 13
    assert ms[Choice(4, 3)] == 24, "no node was deeper than two"


def test_a_tree_that_ran_emitted_what_it_did_whatever_others_put_into_it() -> None:
    known = estimates(CHOICES)
    # The last was retrieved, below a tree of depth 1.
    values, depths = np.array([[[1.0, 0.6, 0.5]]]), np.array([[[0, 1, 2]]])
    known.learn(CHOICES.index(Choice(3, 1)), values, depths, np.ones((1, 1, 3), dtype=bool))
    emitted = by_choice(known.experience().emitted)
    assert emitted[Choice(3, 1)] == 3 and emitted[Choice(2, 1)] == 2
