"""How large each step's tree is: a fixed size, or what a controller chooses by measured goodput.

The loop asks before a step and reports after it.  Choosing reads what past steps drafted, accepted and took; all of it
is settled before the next token is drawn, so no text depends on it but through the sizes of trees.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stree.budget import PLAIN, BudgetController, Choice, flat_choices, layered_choices
from stree.drafters import Draft, Drafter, HasModel
from stree.growth import Growth, Limited
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["AutoSize", "FixedSize", "Steering"]

MAX_NODES, MAX_DEPTH = 64, 8
TIMED = (1, 4, 16, 64)  # nodes of the trees that are timed; costs between them are interpolated


class Steering(Protocol):
    """Decides the size of every step.

    Attributes:
        growth: the shape that its steps are made of, or None.
        max_nodes: most nodes of a step.
        watches: whether a step's outcome must be observed before the next size is asked for.
        is_off: whether plain decoding goes on for now, so that a drafter need not be made ready.
    """

    growth: Growth | None
    max_nodes: int
    watches: bool

    @property
    def is_off(self) -> bool:
        """Tell whether the next step drafts nothing."""
        ...

    def next(self) -> tuple[Growth | None, int]:
        """Give growth and budget of the next step."""
        ...

    def observe(self, draft: Draft, acceptance: Acceptance, seconds: float) -> None:
        """Take note of a step."""
        ...


class FixedSize:
    """The same growth and budget always."""

    watches = False

    def __init__(self, growth: Growth | None, budget: int) -> None:
        self.growth, self.max_nodes = growth, budget

    @property
    def is_off(self) -> bool:
        """Tell whether nothing is ever drafted."""
        return self.max_nodes == 1

    def next(self) -> tuple[Growth | None, int]:
        """Give them."""
        return self.growth, self.max_nodes

    def observe(self, draft: Draft, acceptance: Acceptance, seconds: float) -> None:
        """Learn nothing."""


class AutoSize:
    """A controller over budgets, and over depths where a draft model grows layer by layer.

    Costs are measured once for a pair of models and a batch size, on the machine that runs them, and corrected by what
    steps take; what is learnt of a pair, batch size and growth is kept for the next texts.

    Args:
        lm: the target.
        drafter: proposes the trees, and must give its nodes values.
        growth: the shape, bound to the sampling, or None.
        batch: sequences.
        max_depth: deepest tree; None for the growth's own depth.
    """

    watches = True

    def __init__(
        self, lm: TreeLM, drafter: Drafter, growth: Growth | None, batch: int, *, max_depth: int | None = None
    ) -> None:
        self.max_nodes, self.growth = MAX_NODES, growth
        models = drafter.models if isinstance(drafter, HasModel) else []
        is_coarse = lm.device.type == "cuda" and lm.is_captured is not False  # each size is captured
        choices, self._is_fixed = _choices(growth if models else None, max_depth, is_coarse=is_coarse)
        known = _controllers.setdefault(lm, {})
        key = (batch, type(drafter), tuple(map(id, models)), repr(growth), tuple(choices))
        if key not in known:
            known[key] = BudgetController(choices, _step_ms(lm, models, batch))
        self.controller = known[key]
        self._launched: deque[Choice] = deque()  # sizes that were given and not yet observed
        self._own_seconds = 0.0  # that observing the last step took, which a step of its kind costs

    @property
    def is_off(self) -> bool:
        """Tell whether plain decoding is the best known size."""
        return self.controller.best == PLAIN

    def next(self) -> tuple[Growth | None, int]:
        """Ask the controller."""
        choice = self.controller.choose()
        self._launched.append(choice)
        if self.growth is None or self._is_fixed or choice == PLAIN:
            return self.growth, choice.nodes
        return Limited(self.growth, choice.depth), choice.nodes

    def observe(self, draft: Draft, acceptance: Acceptance, seconds: float) -> None:
        """Report to the controller; of a step of plain decoding nothing but its time, so nothing is read.

        Raises:
            ValueError: the drafter gives its nodes no values.
        """
        began = time.perf_counter()
        choice = self._launched.popleft()
        if choice == PLAIN:
            self.controller.observe_plain(1e3 * seconds)
            return
        tree = draft.tree
        if draft.values is None and tree.tokens.shape[1] > 1:
            raise ValueError('budget="auto" needs a drafter that gives its nodes values')
        parents, depths = tree.parents.cpu().numpy(), tree.depths.cpu().numpy().copy()
        is_node = parents >= 0
        is_node[:, 0] = True
        values = is_node * (1.0 if draft.values is None else draft.values.cpu().numpy())
        path, lengths = acceptance.path.cpu().numpy(), acceptance.path_lengths.cpu().numpy()
        row, place = np.nonzero(np.arange(path.shape[1]) < lengths[:, None])
        is_accepted = np.zeros(parents.shape, dtype=bool)
        is_accepted[row, path[row, place]] = True
        self.controller.observe(choice, values, depths, is_accepted, 1e3 * (seconds + self._own_seconds))
        self._own_seconds = time.perf_counter() - began


def _choices(growth: Growth | None, max_depth: int | None, *, is_coarse: bool) -> tuple[list[Choice], bool]:
    """List the sizes to choose from, a few only if ``is_coarse``, and whether the growth is not to be cut at a depth.

    Raises:
        ValueError: a growth that cannot be cut.
    """
    if growth is None:
        return flat_choices(MAX_NODES), False
    plan = growth.plan(MAX_NODES)
    if plan.is_fixed:
        return [PLAIN, Choice(plan.num_nodes + 1, len(plan.layers))], True
    if plan.is_heap:  # a draft call a node
        return flat_choices(MAX_NODES), True
    if not hasattr(growth, "depth"):
        raise ValueError(f'budget="auto" needs a growth that has a depth, a heap or a fixed shape, got {growth}')
    return layered_choices(MAX_NODES, max_depth or max(len(plan.layers), 1), is_coarse=is_coarse), False


def _step_ms(lm: TreeLM, models: Sequence[TreeLM], batch: int) -> Callable[[Choice], float]:
    """Give the predicted milliseconds of a step: a verification, and a draft call a layer."""
    target, drafts = _verify_ms(lm, batch), [_verify_ms(model, batch) for model in models]

    def step_ms(choice: Choice) -> float:
        width = -(-(choice.nodes - 1) // max(choice.depth, 1))
        return target(choice.nodes) + choice.depth * sum(draft(max(width, 1)) for draft in drafts)

    return step_ms


# What was learnt of a pair serves its next texts; it sets sizes only, so no text's law depends on another.
_controllers: weakref.WeakKeyDictionary[TreeLM, dict[Any, BudgetController]] = weakref.WeakKeyDictionary()
_measured: weakref.WeakKeyDictionary[TreeLM, dict[int, Sequence[float]]] = weakref.WeakKeyDictionary()


def _verify_ms(lm: TreeLM, batch: int) -> Callable[[int], float]:
    """Give the milliseconds of a forward pass by nodes, measured once for a model and a batch size."""
    known = _measured.setdefault(lm, {})
    if batch not in known:
        known[batch] = [_time_verify(lm, batch, nodes) for nodes in TIMED]
    times = known[batch]
    return lambda nodes: float(np.interp(nodes, TIMED, times))


def _time_verify(lm: TreeLM, batch: int, nodes: int) -> float:
    """Time the verification of a tree after a text of two tokens: the fastest of three calls, after one."""
    state = lm.new_state(batch, 2 + nodes, nodes)
    lm.prefill(state, torch.zeros(batch, 2, dtype=torch.long))
    index = torch.arange(nodes, dtype=torch.int32, device=lm.device)
    parents = ((index + 1) // 2 - 1).expand(batch, nodes).contiguous()
    tree = TokenTree.unchecked(torch.zeros(batch, nodes, dtype=torch.long, device=lm.device), parents)
    times = []
    for _ in range(4):
        if lm.device.type == "cuda":
            torch.cuda.synchronize(lm.device)
        began = time.perf_counter()
        lm.verify(state, tree)
        if lm.device.type == "cuda":
            torch.cuda.synchronize(lm.device)
        times.append(1e3 * (time.perf_counter() - began))
    return min(times[1:])
