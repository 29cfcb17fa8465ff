"""How many nodes the steps of a generation have: the budget, its default, and what "auto" chooses from."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Hashable

import torch

from stree.budget.controller import START, StepHistory
from stree.budget.policy import MAX_FIXED, AutoBudget, BudgetPolicy, candidate_sizes
from stree.decode.settings import Settings
from stree.drafters import Drafter, FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Growth
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["budget_policy"]

MANY_NODES = 1024  # above which a budget is most likely a mistake

logger = logging.getLogger("stree")

_histories: weakref.WeakKeyDictionary[TreeLM, dict[Hashable, StepHistory]] = weakref.WeakKeyDictionary()


def budget_policy(settings: Settings, rows: int, kinds: Collection[Sampling]) -> tuple[int | str, BudgetPolicy]:
    """Return the budget, and what chooses growth and nodes of every step by it.

    Args:
        settings: of the batch.
        rows: sequences at once.
        kinds: the sampling parameters of all of them.

    Raises:
        ValueError: a fixed shape above the budget, or trees with branches under block verification.
        NotImplementedError: a larger tree than kernels take.
    """
    lm, drafter = settings.lm, settings.drafter
    growth = drafter.default_growth if settings.growth is None else settings.growth
    # Which trees are planned depends on this alone; the decode step binds the growth to the parameters of each row.
    is_greedy = all(kind.is_greedy for kind in kinds)
    growth = None if growth is None else growth.bind(Sampling(0.0 if is_greedy else 1.0))
    budget = _default_budget(drafter, growth, rows) if settings.budget is None else settings.budget
    if not isinstance(budget, str):
        _check_nodes(lm, drafter, budget)
    sizes = _tree_sizes(drafter, growth, budget)
    _check_nodes(lm, drafter, sizes[-1])
    if sizes[-1] > MANY_NODES:
        logger.warning("a step of %d nodes costs more than it emits; 16 to 64 are usual", sizes[-1])
    if settings.verifier == "block":
        _check_block(drafter, growth, sizes[-1])
    if settings.policy is not None:
        return budget, settings.policy(growth, sizes)
    if len(sizes) == 1:
        return budget, BudgetPolicy(growth, sizes[0])
    # What earlier generations of the same kind of steps have shown.
    key = (
        type(drafter), tuple(map(weakref.ref, drafter.models)), repr(growth), frozenset(kinds), rows, settings.verifier,
        torch.get_num_threads(),
    )  # fmt: skip
    history = _histories.setdefault(lm, {}).setdefault(key, StepHistory())
    # The rows of a batch share a step's cost less than its nodes do: draft calls must first show that they pay.
    start = START if rows == 1 else 1 if drafter.models else START // 2
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


def _check_block(drafter: Drafter, growth: Growth | None, budget: int) -> None:
    """Refuse block verification where trees will have branches, as far as that is known."""
    plan = None if growth is None or not drafter.models else growth.plan(budget)
    widths = [layer.width + layer.leaves for layer in plan.layers] if plan is not None else []
    retrieves = isinstance(drafter, (SuffixDrafter, FusedDrafter)) and budget > 2
    if retrieves or max(widths, default=1) > 1 or (plan is not None and plan.is_heap and plan.num_nodes > 1):
        what = type(drafter).__name__ if plan is None or retrieves else str(growth)
        raise ValueError(f"block verification takes trees without branches, such as Chain's; got {what}")


def _check_nodes(lm: TreeLM, drafter: Drafter, nodes: int) -> None:
    """Refuse larger trees than kernels take."""
    for model in (lm, *drafter.models):
        most = most_nodes(model.device, model.dtype)
        most = None if most is None else most - (model is not lm)  # a draft model runs its last leaf beside the tree
        if most is not None and nodes > most:
            raise NotImplementedError(f"budget must be at most {most} on {model.device}, got {nodes}")
