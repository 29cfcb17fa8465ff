"""What proposes token trees: a draft model, the text's own repetitions, or nothing.

A drafter holds no state of a generation; ``start`` gives a run that does.  A run proposes a tree below the pending
token and observes what became of it.
"""

from stree.drafters.base import (
    Bounded,
    Capturable,
    Composed,
    Draft,
    Drafter,
    DraftRun,
    HasModel,
    Restartable,
    Slotted,
    padded_prompts,
)
from stree.drafters.fused import FusedDrafter
from stree.drafters.model import ModelDrafter, check_vocabulary
from stree.drafters.none import NoDrafter
from stree.drafters.suffix import SuffixDrafter

__all__ = [
    "Bounded", "Capturable", "Composed", "Draft", "DraftRun", "Drafter", "FusedDrafter", "HasModel", "ModelDrafter",
    "NoDrafter", "Restartable", "Slotted", "SuffixDrafter", "check_vocabulary", "padded_prompts",
]  # fmt: skip
