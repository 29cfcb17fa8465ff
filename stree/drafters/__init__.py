"""Drafters propose token trees: from a draft model, from repetitions in texts, from both, or none at all.

A drafter of your own derives from ``Drafter``, and the run that its ``start`` returns from ``DraftRun``.
"""

from stree.drafters.base import (
    Draft,
    Drafter,
    DraftRun,
    TreeProcessor,
    check_vocabulary,
    padded_prompts,
)
from stree.drafters.fused import FusedDrafter
from stree.drafters.head import HeadDrafter
from stree.drafters.loading import DRAFTERS, load
from stree.drafters.model import ModelDrafter
from stree.drafters.none import NoDrafter
from stree.drafters.suffix import SuffixDrafter
from stree.kernels.step.texts import Seen

__all__ = [
    "DRAFTERS", "Draft", "DraftRun", "Drafter", "FusedDrafter", "HeadDrafter", "ModelDrafter", "NoDrafter",
    "Seen", "SuffixDrafter", "TreeProcessor", "check_vocabulary", "load", "padded_prompts",
]  # fmt: skip
