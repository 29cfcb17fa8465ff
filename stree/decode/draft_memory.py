"""Sizes of what drafting holds: nodes of the trees that grow, and rows of logits that a drafter keeps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stree.drafters import Drafter
from stree.drafters.slot_state import block_calls
from stree.drafters.tree_builder import FIRST_DRAFTED, narrowed, num_run, run_widths
from stree.growth import Growth
from stree.kernels.dispatch import fixes_shapes
from stree.models.heads.causal import CausalHead
from stree.models.heads.specblock import SpecBlockHead
from stree.models.peak_bytes import peak_bytes
from stree.models.tree_lm import TreeLM
from stree.models.tree_memory import tree_bytes

__all__ = [
    "Drafting",
    "columns_at_once",
    "kept_rows",
    "one_shot_heads",
    "rereading_bytes",
    "root_rows",
    "row_bytes",
    "scored_bytes",
]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Sizes of the trees that a draft model grows.

    Attributes:
        nodes: most nodes that are run for a tree, root included.
        width: most of them that are run at once: a layer, or the root and the token before it.
        widths: nodes of each draft call behind the first one.
        is_heap: whether they grow node by node, which holds the distributions of all nodes.
        model_bytes: of a text in the growth's acceptance model.
    """

    nodes: int
    width: int
    widths: tuple[int, ...] = ()
    is_heap: bool = False
    model_bytes: int = 0

    @classmethod
    def of(cls, growth: Growth | None, budget: int) -> Drafting | None:
        """Return the sizes for a growth and its largest budget; None where nothing is grown."""
        if growth is None or budget == 1:
            return None
        plan = narrowed(growth.plan(budget))
        widths = tuple(run_widths(plan))
        learnt = peak_bytes(partial(growth.acceptance_model, 1, torch.device("cpu")))
        return cls(num_run(plan), max(FIRST_DRAFTED, *widths, 0), widths, plan.is_heap, learnt)


def one_shot_heads(drafter: Drafter, nodes: int) -> list[Any]:
    """Return the one-shot heads and masked-diffusion models of a drafter of trees of so many nodes."""
    return [model for model in drafter.models if nodes > 1 and not isinstance(model, TreeLM)]


def root_rows(model: Any) -> int:
    """Return the rows of the logits of which a drafter keeps the root's: a draft model's has the token before it."""
    if isinstance(model, SpecBlockHead):
        return model.num_slots
    return FIRST_DRAFTED if isinstance(model, TreeLM) and not isinstance(model, CausalHead) else 1


def kept_rows(model: Any, drafting: Drafting) -> int:
    """Return the rows of logits that a drafter keeps of its last tree: of the root, and of a head's blocks."""
    if isinstance(model, SpecBlockHead):
        return root_rows(model) + model.num_columns(sum(_block_calls(model, drafting)))
    block = 0 if isinstance(model, TreeLM) else 1 + int(model.num_drafted)
    return root_rows(model) + block


def columns_at_once(model: Any, drafting: Drafting) -> int:
    """Return the most columns that are run at once while a tree grows."""
    if isinstance(model, SpecBlockHead):
        return model.num_slots * max(_block_calls(model, drafting))
    return drafting.width


def rereading_bytes(model: Any, drafting: Drafting, batch: int, length: int) -> int:
    """Return the most bytes of running accepted tokens and the next root with the target's features, as heads do."""
    if not isinstance(model, CausalHead):
        return 0
    columns = (len(drafting.widths) + 3) * root_rows(model)
    copies = (columns + 2 * root_rows(model)) * row_bytes(model, batch)  # with the root's as read and as kept
    return max(scored_bytes(model, batch, columns, length), copies)


def row_bytes(model: Any, batch: int) -> int:
    """Return the bytes of the logits of a node of every text as a model gives them, and of a distribution of each."""
    return int(batch * model.vocab_size * max(4, model.dtype.itemsize))


def scored_bytes(model: Any, batch: int, columns: int, length: int) -> int:
    """Return the most bytes of scoring so many columns of every text, the logits among them."""
    row = row_bytes(model, batch)
    if not isinstance(model, TreeLM):
        return 2 * columns * row
    scored = tree_bytes(model, batch, columns, length)
    if not isinstance(model, CausalHead) or model.num_predicted is None:
        return scored
    return max(scored, columns * row * (model.num_predicted + model.vocab_size) // model.vocab_size)  # own and whole


def _block_calls(head: SpecBlockHead, drafting: Drafting) -> list[int]:
    return block_calls(drafting.widths, head.num_slots, anywhere=not fixes_shapes(next(head.model.parameters())))
