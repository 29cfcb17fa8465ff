"""Drafting with a head, such as the target's own MTP layers, or with a masked-diffusion model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from stree.drafters.base import Drafter, check_vocabulary
from stree.drafters.block_state import BlockState
from stree.drafters.diffusion_state import DiffusionState
from stree.drafters.head_state import HeadState
from stree.drafters.model import ModelRun
from stree.drafters.slot_state import SlotState
from stree.growth import Calibrated, Growth
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash import OneShotHead
from stree.models.heads.diffusion import MaskedDiffusion
from stree.models.heads.specblock import SpecBlockHead
from stree.models.tree_lm import TreeLM
from stree.sampling import Random

__all__ = ["HeadDrafter"]


class HeadDrafter(Drafter):
    """Draft with a head of the target; see ``stree.heads.load``.

    A head grows a tree by any growth, and its trees are lossless as a draft model's are: nodes are drawn from
    distributions that are stored, whatever the features were.  A one-shot head runs once for a tree, so its default
    growth is as deep as its block; see `BlockState`.  So is that of a masked-diffusion model, which reads no hidden
    states; see `DiffusionState`.

    Args:
        head: of the target that is to be drafted for.
        vocab: tokens that it may draft, as for ``ModelDrafter``; None for all that it predicts.

    Raises:
        TypeError: something else than a head.
        ValueError: tokens that are none of the vocabulary's.
        NotImplementedError: a head that cannot be trimmed.
    """

    default_growth: Growth = Calibrated()

    def __init__(
        self, head: CausalHead | OneShotHead | MaskedDiffusion, vocab: Sequence[int] | Tensor | None = None
    ) -> None:
        if not isinstance(head, (CausalHead, OneShotHead, MaskedDiffusion)):
            raise TypeError(f"head must be a draft head, as stree.heads.load returns, got {type(head).__name__}")
        self.head = head if vocab is None else head.trimmed(vocab)
        if not isinstance(head, CausalHead):
            self.default_growth = Calibrated(depth=head.num_drafted)

    @property
    def models(self) -> Sequence[TreeLM]:
        """The head."""
        return [cast(TreeLM, self.head)]

    @property
    def hidden_layers(self) -> Sequence[int] | None:
        """Layers of the target whose hidden states the head reads, or None."""
        return self.head.hidden_layers

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> ModelRun:
        """Begin a run; all heads need the target's hidden states of the prompts, a masked-diffusion model does not."""
        check_vocabulary(self.models[0], vocab_size)
        if isinstance(self.head, SpecBlockHead):
            return ModelRun(SlotState(self.head, prompts), rng)
        if isinstance(self.head, MaskedDiffusion):
            return ModelRun(DiffusionState(self.head, prompts), rng)
        if isinstance(self.head, CausalHead):
            return ModelRun(HeadState(self.head, prompts), rng)
        return ModelRun(BlockState(self.head, prompts), rng)
