"""The state of a masked-diffusion drafter: none but the text, whose last tokens are encoded anew for every tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from stree.drafters.base import Draft
from stree.drafters.block_state import within_block
from stree.drafters.candidates import by_kind
from stree.drafters.draft_state import DraftState
from stree.growth import Plan
from stree.kernels.step.texts import Seen
from stree.models.heads.diffusion import MaskedDiffusion
from stree.models.tree_lm import TreeLM
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["DiffusionState"]

FIRST_NUMBER = 1 << 24  # of the draws of denoising steps, beyond those of a tree's nodes
NUMBERS_A_STEP = 1 << 10


class DiffusionState(DraftState):
    """The nodes of a depth share the distribution of their position in the window; see ``MaskedDiffusion.denoise``.

    The first layer of a tree runs all denoising steps, later ones only look up what these gave.  Everything before the
    last step is drawn with numbers of its own, and without the target; given that, nodes are drawn from the stored
    distributions, so every verifier and growth is lossless as with a draft model.

    Args:
        model: drafts.
        prompts: of the first texts.
    """

    _seen: Seen
    _rng: Random
    _sampling: AnySampling
    _window: Tensor  # [batch, window, vocab] logits of the tree that grows

    def __init__(self, model: MaskedDiffusion, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(cast(TreeLM, model), prompts)
        self.model = model

    def run_prompts(self) -> None:
        """Do nothing: texts are read when a tree is drafted."""

    def reserve_nodes(self, nodes: int) -> None:
        """Do nothing: nodes are not run."""

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Do nothing: the next step shows the text."""

    def catch_up(self, seen: Seen) -> int:
        """Note where the texts are; no draft call."""
        self._seen = seen
        return 0

    def fitted(self, plan: Plan) -> Plan:
        """Return a plan whose trees lie within a window."""
        return within_block(super().fitted(plan), self.model.num_drafted)

    def num_calls(self, num_scored: int) -> int:
        """Count the denoising steps."""
        return self.model.steps if num_scored else 0

    def begin_tree(self, rng: Random, sampling: AnySampling) -> None:
        """Take the random numbers of a step, and how tokens are drawn in it."""
        self._rng, self._sampling = rng, sampling

    def score(self, tree: TokenTree, first: int) -> Tensor:
        """Look up the logits of the positions after the columns ``first``.., but for the first column's."""
        if first == 0:
            tokens, is_text = self._text(tree.tokens[:, 1])
            self._window = self.model.denoise(tokens, is_text, self._draw)
        place = (tree.depths[:, max(first, 1) :].long() - 1).clamp(0, self.model.num_drafted - 1)
        return self._window.gather(1, place[..., None].expand(-1, -1, self._window.shape[2]))

    def _text(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last tokens of the texts, int64[batch, context], and which are there, bool[batch, context]."""
        size, seen = self.model.config.context, self._seen
        index = seen.lengths[:, None] + torch.arange(1 - size, 1, device=pending.device)
        tokens = seen.tokens.gather(1, index.clamp(0, seen.tokens.shape[1] - 1))
        return torch.cat([tokens[:, :-1], pending[:, None]], 1), index >= 0

    def _draw(self, step: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the tokens of a denoising step; a greedy text has the most probable ones."""
        probs, _ = self._sampling.draft_probs(logits)
        number = torch.arange(probs.shape[1], device=probs.device) + FIRST_NUMBER + step * NUMBERS_A_STEP
        number = number.expand(probs.shape[:2])
        drawn = partial(self._rng.choice, "draft", probs, torch.zeros_like(number), number)
        tokens = by_kind(self._sampling, partial(probs.argmax, -1), drawn)
        return tokens, probs.gather(-1, tokens[..., None]).squeeze(-1)
