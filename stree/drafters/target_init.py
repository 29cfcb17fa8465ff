"""Candidates from the target's own distribution, continued by a draft model: what ``TargetInit`` runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun, in_turn
from stree.drafters.model import ModelDrafter
from stree.drafters.tree_builder import FIRST_DRAFTED
from stree.growth import Growth, TargetInit
from stree.kernels.step.texts import Seen
from stree.models.tree_lm import TreeLM
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
        return _TargetInitRun(self.drafter.start(vocab_size, prompts, rng), len(prompts), self.drafter.lm.device)


class _RootLogits:
    """Processes a draft model's logits so that those of the root are given ones.

    Attributes:
        logits: float[batch, vocab], or None where they stay the model's own.
    """

    logits: Tensor | None = None

    def __call__(self, tree: TokenTree, logits: Tensor) -> Tensor:
        """Replace float[batch, 1, vocab] of a tree's first call, which scores the root."""
        if self.logits is None or tree.tokens.shape[1] > FIRST_DRAFTED:
            return logits
        return self.logits[:, None].to(logits)


class _TargetInitRun(DraftRun):
    """A draft model's run, and the distribution that the last verification left in each row."""

    can_begin = True

    def __init__(self, run: DraftRun, batch: int, device: torch.device) -> None:
        self._run, self._root = run, _RootLogits()
        self._left: Tensor | None = None  # float[batch, vocab]
        self._has_left = torch.zeros(batch, 1, dtype=torch.bool, device=device)
        self._has_new_text = True  # whether some row has nothing left yet

    def prepare(self, seen: Seen, budget: int) -> int:
        return self._run.prepare(seen, budget)

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Draw candidates and continue them; propose the root alone where nothing was left."""
        assert growth is not None, "TargetInit is no default"
        if self._left is not None:
            temperature = torch.as_tensor(growth.sampling.temperature, dtype=self._left.dtype).view(-1, 1)
            # The draft's sampling divides by it, unless it is greedy.
            self._root.logits = self._left.log() * torch.where(temperature == 0, 1.0, temperature)
        self._run.processor = in_turn(self.processor, self._root)
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

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self._has_left[list(rows)] = False
        self._has_new_text = True
        self._run.prefixes = self.prefixes
        self._run.begin(rows, prompts)

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        self._run.reserve(max_length, growth, budget, begins=begins)
