"""Candidates from the target's own distribution, continued by a draft model: what ``TargetInit`` runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun
from stree.drafters.model import ModelDrafter
from stree.growth import Growth, TargetInit
from stree.models.tree_lm import TreeLM
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import LONGEST, Acceptance

__all__ = ["TargetInitDrafter", "drafter_and_verifier"]


def drafter_and_verifier(
    drafter: Drafter, growth: Growth | None, verifier: str, allow_lossy: bool
) -> tuple[Drafter, str]:
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
    return TargetInitDrafter(drafter), LONGEST


class TargetInitDrafter(Drafter):
    """A model drafter whose root draws its children from the distribution that verification left, not from its own.

    For LONGEST only, which leaves such a distribution.  A text's first step has none: it proposes the root alone,
    emits nothing, and is not counted in tau.

    Args:
        drafter: continues the candidates.
    """

    is_lossless = False

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter = drafter

    @property
    def models(self) -> Sequence[TreeLM]:
        """The draft model."""
        return self.drafter.models

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> TargetInitDrafter:
        """Return a drafter over ``change`` of this one's model."""
        return TargetInitDrafter(self.drafter.with_model(change))

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _TargetInitRun:
        """Begin a run, in which no distribution was left yet."""
        model = _TargetInitLM(self.drafter.lm)
        run = self.drafter.with_model(lambda _: cast(TreeLM, model)).start(vocab_size, prompts, rng)
        return _TargetInitRun(run, model, len(prompts))


class _TargetInitLM:
    """A draft model with given logits for the root of a tree: ``root_logits``, float[batch, vocab], unless None."""

    def __init__(self, lm: TreeLM) -> None:
        self._lm = lm
        self.root_logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def verify(self, state: Any, tree: TokenTree, first: int = 0) -> Tensor:
        """Score a tree; a call with ``first=0`` runs the leading columns, of which the pending token is one."""
        logits = self._lm.verify(state, tree, first)
        if first or self.root_logits is None:
            return logits
        return self.root_logits[:, None].to(logits).expand_as(logits)


class _TargetInitRun(DraftRun):
    """A draft model's run, and the distribution that the last verification left in each row."""

    can_admit = True

    def __init__(self, run: DraftRun, model: _TargetInitLM, batch: int) -> None:
        self._run, self._model = run, model
        self._left: Tensor | None = None  # float[batch, vocab]
        self._has_left = torch.zeros(batch, 1, dtype=torch.bool, device=model.device)
        self._has_new_text = True  # whether some row has nothing left yet

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Draw candidates and continue them; propose the root alone where nothing was left."""
        assert growth is not None, "TargetInit is no default"
        if self._left is not None:
            temperature = torch.as_tensor(growth.sampling.temperature, dtype=self._left.dtype).view(-1, 1)
            # The draft's sampling divides by it, unless it is greedy.
            self._model.root_logits = self._left.log() * torch.where(temperature == 0, 1.0, temperature)
        draft = self._run.propose(pending, growth, budget)
        if not self._has_new_text:
            return draft
        is_node = self._has_left.expand_as(draft.tree.tokens).clone()
        is_node[:, 0] = True
        parents = draft.tree.parents.masked_fill(~is_node, -1)
        return replace(draft, tree=TokenTree.unchecked(draft.tree.tokens * is_node, parents))

    def observe(self, acceptance: Acceptance) -> None:
        assert acceptance.left is not None, "TargetInit is verified by LONGEST"
        self._left, self._has_new_text = acceptance.left.clone(), False
        self._has_left.fill_(True)
        self._run.observe(acceptance)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self._has_left[row] = False
        self._has_new_text = True
        self._run.admit(row, prompt)

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        self._run.reserve(max_length, growth, budget, begins=begins)
