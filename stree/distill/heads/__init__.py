"""Training of draft heads: a file for each kind and each recipe, on the loop of `stree.distill.training`."""

from __future__ import annotations

from collections.abc import Callable

from stree.distill.heads.causal import new_eagle3, new_mtp
from stree.distill.heads.dflash import new_dflash
from stree.distill.heads.diffusion import new_diffusion
from stree.distill.heads.fspad import Fspad
from stree.distill.heads.griffin import Griffin
from stree.distill.heads.hass import Hass
from stree.distill.heads.network import HeadNetwork
from stree.distill.heads.recipe import PLAIN, Recipe
from stree.distill.heads.specblock import new_specblock
from stree.models.tree_lm import TreeLM

__all__ = ["HEADS", "RECIPES", "new_head"]

HEADS: dict[str, Callable[..., HeadNetwork]] = {
    "mtp": new_mtp,
    "eagle3": new_eagle3,
    "dflash": new_dflash,
    "specblock": new_specblock,
    "diffusion": new_diffusion,
}
"""By kind, what makes a head with random weights from a target, a seed and, for those that have any, a recipe."""
RECIPES: dict[str, Recipe] = {"plain": PLAIN, "hass": Hass(), "griffin": Griffin(), "fspad": Fspad()}


def new_head(target: TreeLM, kind: str, seed: int, recipe: str = "plain") -> HeadNetwork:
    """Make a head with random weights; ``Settings`` knows the recipes of a kind."""
    return HEADS[kind](target, seed, *(() if recipe == "plain" else (RECIPES[recipe],)))
