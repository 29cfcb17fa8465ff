"""How many nodes the steps of a generation have: the budget, its default, and what "auto" chooses from."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable

import torch

from stree.budget.controller import START, StepHistory
from stree.budget.policy import MAX_FIXED, AutoBudget, BudgetPolicy, candidate_sizes
from stree.decode.request import Batch, GenerateArguments
from stree.decode.validation import check_block, check_nodes
from stree.drafters import Drafter, NoDrafter
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["budget_policy"]

MANY_NODES = 1024  # above which a budget is most likely a mistake

logger = logging.getLogger("stree")

_histories: weakref.WeakKeyDictionary[TreeLM, dict[Hashable, StepHistory]] = weakref.WeakKeyDictionary()


def budget_policy(
    lm: TreeLM, drafter: Drafter, batch: Batch, arguments: GenerateArguments
) -> tuple[int | str, BudgetPolicy]:
    """Return the budget, and what chooses growth and nodes of every step by it."""
    growth = drafter.default_growth if arguments.growth is None else arguments.growth
    # Which trees are planned depends on this alone; the decode step binds the growth to the parameters of each row.
    growth = None if growth is None else growth.bind(Sampling(0.0 if batch.is_greedy else 1.0))
    budget = _default_budget(drafter, growth, batch.max_batch) if arguments.budget is None else arguments.budget
    sizes = _tree_sizes(drafter, growth, budget)
    check_nodes(lm, drafter, sizes[-1])
    if sizes[-1] > MANY_NODES:
        logger.warning("a step of %d nodes costs more than it emits; 16 to 64 are usual", sizes[-1])
    if arguments.verifier == "block":
        check_block(drafter, growth, sizes[-1])
    if arguments.policy is not None:
        return budget, arguments.policy(growth, sizes)
    if len(sizes) == 1:
        return budget, BudgetPolicy(growth, sizes[0])
    history = _step_history(lm, drafter, growth, batch, arguments.verifier)
    # The rows of a batch share a step's cost less than its nodes do: draft calls must first show that they pay.
    start = START if batch.max_batch == 1 else 1 if drafter.models else START // 2
    return budget, AutoBudget(growth, sizes, history, start)


def _default_budget(drafter: Drafter, growth: Growth | None, batch: int) -> int | str:
    """Return the budget where the caller names none: START nodes for one sequence with a model, or a fixed shape."""
    if batch > 1 or not drafter.models or not drafter.is_lossless:
        return "auto"
    sizes = candidate_sizes(growth)
    return START if START in sizes else sizes[-1]


def _tree_sizes(drafter: Drafter, growth: Growth | None, budget: int | str) -> list[int]:
    """List the sizes that steps may have: one, or what "auto" chooses from."""
    if isinstance(budget, str):
        if isinstance(drafter, NoDrafter):
            return [1]
        if drafter.is_lossless:
            return candidate_sizes(growth)
        assert growth is not None, "a lossy rule has a growth"
        budget = growth.plan(MAX_FIXED).num_nodes + 1
    if growth is not None:
        growth.plan(budget)  # refuses a fixed shape above the budget
    return [budget]


def _step_history(lm: TreeLM, drafter: Drafter, growth: Growth | None, batch: Batch, verifier: str) -> StepHistory:
    """Return what earlier generations of the same kind of steps have shown."""
    histories = _histories.setdefault(lm, {})
    key = (
        type(drafter), tuple(map(weakref.ref, drafter.models)), repr(growth), batch.kinds, batch.max_batch, verifier,
        torch.get_num_threads(),
    )  # fmt: skip
    return histories.setdefault(key, StepHistory())
