"""How many nodes the steps of a generation have: the budget, its default, and what "auto" chooses from."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Hashable

import torch

from stree.budget.controller import SIZES, START, AcceptanceLevel, StepHistory
from stree.budget.policy import AutoBudget, BudgetPolicy
from stree.checks import check_object
from stree.decode.settings import Settings
from stree.drafters import Drafter, FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Growth, checked_plan
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import name_of

__all__ = ["budget_policy"]

MANY_NODES = 1024  # above which a budget is most likely a mistake
MAX_FIXED = 1 << 20  # nodes of a fixed shape that is laid out; what kernels take is checked where they are known

logger = logging.getLogger("stree")

# What earlier generations have shown, by target and kind of steps.
_histories: weakref.WeakKeyDictionary[TreeLM, dict[Hashable, StepHistory]] = weakref.WeakKeyDictionary()


def budget_policy(
    settings: Settings, rows: int, kinds: Collection[Sampling], level: AcceptanceLevel | None = None
) -> tuple[int | str, BudgetPolicy]:
    """Return the budget, and what chooses growth and nodes of every step by it.

    Args:
        settings: of the batch.
        rows: sequences at once.
        kinds: the sampling parameters of all of them.
        level: of the texts, where they also have steps of other numbers of rows.

    Raises:
        ValueError: a fixed shape above the budget, or trees with branches under block verification.
        NotImplementedError: a larger tree than kernels take.
    """
    lm, drafter = settings.lm, settings.drafter
    growth = drafter.default_growth if settings.growth is None else settings.growth
    # Which trees are planned depends on this alone; the decode step binds the growth to the parameters of each row.
    is_greedy = all(kind.is_greedy for kind in kinds)
    if growth is not None:
        bound = growth.bind(Sampling(0.0 if is_greedy else 1.0))
        check_object(f"what {type(growth).__name__}.bind returns", bound, "bind", "stree.growth.Chain(4)")
        growth = bound
    if isinstance(settings.budget, int):
        _check_nodes(lm, drafter, settings.budget)  # before a shape of so many is laid out
    budget, sizes = _tree_sizes(drafter, growth, settings.budget, rows)
    _check_nodes(lm, drafter, sizes[-1])
    if sizes[-1] > MANY_NODES:
        what = "a step of %d nodes costs more than it emits, on a CPU by the square of the nodes; 16 to 64 are usual"
        logger.warning(what, sizes[-1])
    if settings.verifier == "block":
        _check_block(drafter, growth, sizes[-1])
    if settings.policy is not None:
        return budget, settings.policy(growth, sizes)
    if len(sizes) == 1:
        return budget, BudgetPolicy(growth, sizes[0])
    steps_key = (
        type(drafter), tuple(map(weakref.ref, drafter.models)), torch.get_num_threads(), repr(growth), frozenset(kinds),
        rows, name_of(settings.verifier),
    )  # fmt: skip
    history = _histories.setdefault(lm, {}).setdefault(steps_key, StepHistory())
    # The rows of a batch share a step's cost less than its nodes do: draft calls must first show that they pay.
    start = START if rows == 1 else 1 if drafter.models else START // 2
    return budget, AutoBudget(growth, sizes, history, start, level)


def _tree_sizes(
    drafter: Drafter, growth: Growth | None, budget: int | str | None, rows: int
) -> tuple[int | str, list[int]]:
    """Return the budget, its default for None, and the sizes that steps may have: one, or what "auto" chooses from."""
    if isinstance(budget, int):
        if growth is not None:
            checked_plan(growth, budget)  # refuses a fixed shape above the budget
        return budget, [budget]
    if isinstance(drafter, NoDrafter):
        return "auto", [1]
    sizes = _candidates(growth)
    if not drafter.is_lossless:  # its rule has no plain steps
        return "auto", sizes[-1:]
    if budget is None and rows == 1 and drafter.models:
        size = START if START in sizes else sizes[-1]
        return size, [size]
    return "auto", sizes


def _candidates(growth: Growth | None) -> list[int]:
    """List the sizes that a controller chooses from: SIZES, or of a fixed shape all of it or nothing."""
    if growth is None:
        return [*SIZES]
    try:
        plan = checked_plan(growth, SIZES[-1])
    except ValueError:  # a fixed shape of more nodes, which then names its own size
        plan = checked_plan(growth, MAX_FIXED)
    return [1, plan.num_nodes + 1] if plan.is_fixed else [*SIZES]


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
        most = None if most is None else most - (model is not lm)  # a draft model runs the token before the tree, too
        if most is not None and nodes > most:
            raise NotImplementedError(f"budget must be at most {most} on {model.device}, got {nodes}")
