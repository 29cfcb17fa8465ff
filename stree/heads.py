"""Draft heads that read the target's hidden states; see `stree.models.heads`."""

from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash_head import OneShotHead
from stree.models.heads.diffusion import MaskedDiffusion
from stree.models.heads.formats import head_layout, load
from stree.models.heads.mtp import mtp_files

__all__ = ["CausalHead", "MaskedDiffusion", "OneShotHead", "head_layout", "load", "mtp_files"]
