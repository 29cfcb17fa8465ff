"""Training of draft heads: one file for each kind, on the loop of `stree.distill.training`."""

from __future__ import annotations

from collections.abc import Callable

from stree.distill.heads.causal import new_eagle3, new_mtp
from stree.distill.heads.dflash import new_dflash
from stree.distill.heads.network import HeadNetwork
from stree.models.tree_lm import TreeLM

__all__ = ["HEADS"]

HEADS: dict[str, Callable[[TreeLM, int], HeadNetwork]] = {
    "mtp": new_mtp,
    "eagle3": new_eagle3,
    "dflash": new_dflash,
}
"""By kind, what makes a head with random weights from a target and a seed."""
