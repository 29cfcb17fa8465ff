"""The builds of laws and their norms: of a vocabulary whose rows are aligned, and of one whose rows are not."""

from __future__ import annotations

import torch
from aot_attention import Launch
from aot_build import POINTERS, Build

from stree.kernels.law import law_constants, law_warps
from stree.kernels.law_kernels import law_kernel

VOCABULARIES = {"vocabulary of 50257": 50257, "vocabulary of 151936": 151936}


def law_build(vocab: int, n: int, dtype: torch.dtype) -> Build:
    """Describe the launch of laws with their norms; any number of nodes takes the same build."""
    constants = law_constants(vocab, aligned=vocab % 16 == 0)
    pointers = {"logit_ptr": POINTERS[dtype], "law_ptr": "*fp32", "norm_ptr": "*fp32"}
    strides = dict.fromkeys(("stride_logit_b", "stride_logit_r", "stride_law_b", "stride_law_r"), vocab)
    tile = Launch(constants["BLOCK"], law_warps(constants["BLOCK"]))
    return Build(law_kernel, constants, pointers, {"rows": n, "vocab": vocab} | strides, tile)


BUILDERS = {"law": (law_build, VOCABULARIES)}
