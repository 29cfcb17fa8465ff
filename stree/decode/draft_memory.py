"""Sizes of what drafting holds: nodes of the trees that grow, and rows of logits that a drafter keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stree.drafters import Drafter
from stree.drafters.tree_builder import FIRST_DRAFTED, narrowed, num_run
from stree.growth import Growth
from stree.models.heads.causal import CausalHead
from stree.models.peak_bytes import peak_bytes
from stree.models.tree_lm import TreeLM

__all__ = ["Drafting", "kept_rows", "one_shot_heads", "root_rows"]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Sizes of the trees that a draft model grows.

    Attributes:
        nodes: most nodes that are run for a tree, root included.
        width: most of them that are run at once: a layer, or the root and the token before it.
        is_heap: whether they grow node by node, which holds the distributions of all nodes.
        model_bytes: of a text in the growth's acceptance model.
    """

    nodes: int
    width: int
    is_heap: bool = False
    model_bytes: int = 0

    @classmethod
    def of(cls, growth: Growth | None, budget: int) -> Drafting | None:
        """Return the sizes for a growth and its largest budget; None where nothing is grown."""
        if growth is None or budget == 1:
            return None
        plan = narrowed(growth.plan(budget))
        width = max(FIRST_DRAFTED, *(layer.width for layer in plan.layers[:-1]), 0)
        learnt = peak_bytes(partial(growth.acceptance_model, 1, torch.device("cpu")))
        return cls(num_run(plan), width, plan.is_heap, learnt)


def one_shot_heads(drafter: Drafter, nodes: int) -> list[Any]:
    """Return the one-shot heads and masked-diffusion models of a drafter of trees of so many nodes."""
    return [model for model in drafter.models if nodes > 1 and not isinstance(model, TreeLM)]


def root_rows(model: Any) -> int:
    """Return the rows of the logits of which a drafter keeps the root's: a draft model's has the token before it."""
    return FIRST_DRAFTED if isinstance(model, TreeLM) and not isinstance(model, CausalHead) else 1


def kept_rows(model: Any) -> int:
    """Return the rows of logits that a drafter keeps of its last tree: of the root, and of a one-shot head's block."""
    block = 0 if isinstance(model, TreeLM) else 1 + int(model.num_drafted)
    return root_rows(model) + block
