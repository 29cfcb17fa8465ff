"""Which head a checkpoint holds, by its config and the names of its tensors."""

from __future__ import annotations

from pathlib import Path

from stree.models.heads.causal import CausalHead
from stree.models.heads.mtp import load_mtp
from stree.models.tree_lm import TreeLM

__all__ = ["load"]


def load(source: str | Path, target: TreeLM) -> CausalHead:
    """Load a draft head.

    Args:
        source: "mtp" for the MTP layers in the checkpoint that the target was loaded from.
        target: the head is placed on its device, in its dtype, and may share its embedding and output head.

    Raises:
        NotImplementedError: a layout that is not known.
        ValueError: the checkpoint cannot be read, or does not fit the target.
    """
    if source == "mtp":
        return load_mtp(target)
    raise NotImplementedError(f"the layout of draft head {str(source)!r} is not known; known is 'mtp'")
