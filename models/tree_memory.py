"""Memory of scoring trees: the peak of a forward over a tree, which is run on tensors without values.

On a GPU the Triton kernels' outputs are counted, which are allocated and not computed; on a CPU the temporaries of the
reference, which serves there.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stree.kernels.dispatch import TRITON, as_on_device
from stree.models.measured_bytes import measured_bytes
from stree.models.prefill_memory import PrefillBytes, model_without_values
from stree.models.tree_scorer import TreeScorer
from stree.tree import TokenTree

__all__ = ["tree_bytes"]


def tree_bytes(lm: TreeScorer, batch: int, nodes: int, length: int) -> int:
    """Return the most bytes that scoring a tree holds beside the state: activations, temporaries and the logits.

    Args:
        lm: the model; its weights are not read.
        batch: texts.
        nodes: of each tree, root included.
        length: most tokens of a text.

    Returns:
        The bytes, or 0 for a model whose forward needs values.
    """
    if lm.device.type == "cuda":  # kernels read the context in place
        return _at(lm, batch, nodes, nodes)
    length = max(length, nodes)
    longer = 1 << (length - 1).bit_length()
    shorter, high = longer // 2, _at(lm, batch, nodes, longer)
    if length == longer:
        return high
    low = _at(lm, batch, nodes, shorter)
    return low + (high - low) * (length - shorter) // (longer - shorter)


def _at(lm: TreeScorer, batch: int, nodes: int, length: int) -> int:
    """Return the bytes at a length; they are a convex function of it, so between two lengths at most the mean."""
    sizes = batch, nodes, length
    return measured_bytes("tree", lm, (*sizes, lm.fused_layers, lm.fused_mixers), lambda: _measure(lm, *sizes))


def _measure(lm: TreeScorer, batch: int, nodes: int, length: int) -> int:
    """Score a chain on ``meta``."""
    on_gpu = lm.device.type == "cuda"
    with (
        torch.no_grad(), _disable_current_modes(), torch.device("meta"),
        as_on_device(triton=on_gpu, operations=TRITON if on_gpu else (), launches=False),
    ):  # fmt: skip
        other = TreeScorer(model_without_values(lm))
        other.fused_layers, other.fused_mixers = lm.fused_layers, lm.fused_mixers
        tokens = torch.zeros(batch, nodes, dtype=torch.long)
        tree = TokenTree.unchecked(tokens, (torch.arange(nodes).expand(batch, -1) - 1).int())
        state = other.new_state(batch, max(length, 1), nodes, fixed_shapes=True)
        tracker = PrefillBytes(is_padded=False)
        with tracker:
            other.score(state, tree, 0, None)
    return tracker.peak
