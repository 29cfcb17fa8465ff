"""Candidates from the target's own distribution, continued by a draft model: what ``TargetInit`` runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, check_vocabulary
from stree.drafters.draft_state import DraftState
from stree.drafters.model import ModelDrafter, ModelRun
from stree.growth import Growth, TargetInit
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import LONGEST, Acceptance, Verifier

__all__ = ["TargetInitDrafter", "drafter_and_verifier"]


def drafter_and_verifier(
    drafter: Drafter, growth: Growth | None, verifier: str | Verifier, allow_lossy: bool
) -> tuple[Drafter, str | Verifier]:
    """Drafter and verifier for a growth: those that the caller named, but for ``TargetInit``.

    Raises:
        ValueError: ``TargetInit`` is not allowed, or cannot run with these.
    """
    if not isinstance(growth, TargetInit):
        return drafter, verifier
    if not allow_lossy:
        raise ValueError("TargetInit does not keep the target's distribution; it runs only with allow_lossy=True")
    if not isinstance(drafter, ModelDrafter):
        raise ValueError(f"TargetInit needs a ModelDrafter, got {type(drafter).__name__}")
    if verifier != "auto":
        raise ValueError(f"TargetInit has a verifier of its own; leave verifier at 'auto', got {verifier!r}")
    return TargetInitDrafter(drafter.lm), LONGEST


class TargetInitDrafter(ModelDrafter):
    """A model drafter whose root draws its children from the distribution that verification left, not from its own.

    For LONGEST only, which leaves such a distribution.  A text's first step has none: it proposes the root alone,
    emits nothing, and is not counted in tau.
    """

    is_lossless = False

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _TargetInitRun:
        """Begin a run, in which no distribution was left yet."""
        check_vocabulary(self.lm, vocab_size)
        return _TargetInitRun(DraftState(self.lm, prompts), rng)


class _TargetInitRun(ModelRun):
    """A draft model's run, and the distribution that the last verification left in each row."""

    can_select = can_extend = is_on_device = False

    def __init__(self, state: DraftState, rng: Random) -> None:
        super().__init__(state, rng)
        self._residual: Tensor | None = None  # float[batch, vocab]
        self._root_logits: Tensor | None = None  # float[batch, vocab], of which the root's children are drawn
        self._has_left = torch.zeros(len(state.prompts), 1, dtype=torch.bool, device=state.device)
        self._has_new_text = True  # whether some row has nothing left yet

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Draw candidates and continue them; propose the root alone where nothing was left."""
        assert growth is not None, "TargetInit is no default"
        if self._residual is not None:
            temperature = torch.as_tensor(growth.sampling.temperature, dtype=self._residual.dtype).view(-1, 1)
            # The draft's sampling divides by it, unless it is greedy.
            self._root_logits = self._residual.log() * torch.where(temperature == 0, 1.0, temperature)
        draft = super().propose(pending, growth, budget)
        if not self._has_new_text:
            return draft
        is_node = self._has_left.expand_as(draft.tree.tokens).clone()
        is_node[:, 0] = True
        parents = draft.tree.parents.masked_fill(~is_node, -1)
        return replace(draft, tree=TokenTree.unchecked(draft.tree.tokens * is_node, parents))

    def score(self, tree: TokenTree, first: int) -> Tensor:
        logits = super().score(tree, first)
        return logits if first or self._root_logits is None else self._root_logits[:, None].to(logits)

    def observe(self, acceptance: Acceptance) -> None:
        assert acceptance.left is not None, "TargetInit is verified by LONGEST"
        self._residual, self._has_new_text = acceptance.left.clone(), False
        self._has_left.fill_(True)
        super().observe(acceptance)

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._has_left[list(rows)] = False
        self._has_new_text = True
        super().begin(rows, prompts)
