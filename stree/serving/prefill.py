"""How many tokens of a prompt run at once, so that running requests go on in between."""

from __future__ import annotations

from dataclasses import replace

from stree.decode.memory import Extent, fits_in_memory
from stree.drafters import Drafter
from stree.models.tree_lm import TreeLM

__all__ = ["default_chunk"]

CHUNK = 512  # tokens of a prompt that run at once, where steps are not captured


def default_chunk(lm: TreeLM, drafter: Drafter, extent: Extent) -> int:
    """Return how many tokens of a prompt run between two steps where the caller names no number.

    On CUDA as many as memory allows: a forward of few tokens takes as long as the launch of all its kernels.
    """
    if lm.device.type != "cuda":
        return CHUNK
    size = extent.prompt_length
    while size > CHUNK and not fits_in_memory(lm, drafter, replace(extent, chunk=size)):
        size //= 2
    return size
