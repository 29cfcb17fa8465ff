"""Dividing one budget between retrieved nodes and a draft model's, by value, before anything is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters.base import Draft
from stree.growth import Growth, Plan
from stree.growth.calibrated import typical_values

__all__ = ["draws_by_value", "retrieved_share"]

TYPICAL_DEPTH, TYPICAL_RANKS = 6, 4  # of the model's tree that retrieved nodes are compared with


def draws_by_value(plan: Plan, growth: Growth | None) -> bool:
    """Whether a growth draws by value, so that the budget may differ from row to row without changing random keys."""
    is_by_value = all(layer.slots is None for layer in plan.layers)
    return growth is not None and not growth.sampling.is_greedy and is_by_value


def retrieved_share(retrieved: Draft, is_kept: Tensor, budget: int) -> Tensor:
    """Count the retrieved nodes with a greater value than nodes of a typical model's tree in their places.

    Where retrieval is right, the model's nodes beside it are of no use: a typical node's value is reduced by half the
    probability of the retrieved first tokens.

    Args:
        retrieved: tree and values.
        is_kept: bool[batch, n], nodes that may be used.
        budget: nodes, root included.

    Returns:
        int64[batch], at most ``budget - 2`` where that is not negative, so that the model can draft.
    """
    assert retrieved.values is not None, "propose has checked"
    values = retrieved.values * is_kept
    first = (values * (retrieved.tree.depths == 1)).sum(1, keepdim=True).clamp(max=1)
    typical = values.new_tensor(typical_values(budget - 1, TYPICAL_DEPTH, TYPICAL_RANKS)) * (1 - 0.5 * first)
    both = torch.cat([values[:, 1:], typical.expand(len(values), -1)], 1)
    most = max(budget - 2, 0)
    best = both.sort(dim=1, descending=True, stable=True).indices[:, : budget - 1]
    is_retrieved = (best < values.shape[1] - 1) & (both.gather(1, best) > 0)
    return is_retrieved.sum(1).clamp(max=most)
