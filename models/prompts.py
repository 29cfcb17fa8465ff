"""Prompts: what they must be, and long ones in bounded memory.

What follows the first chunk of a long prompt runs through our own scans, as chains that are committed: transformers'
continuation of a cache by several tokens is wrong for some families, so it is used for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stree.kernels.topology import most_nodes
from stree.models.checks import describe, is_integer
from stree.models.state import DecodeState
from stree.tree import TokenTree

if TYPE_CHECKING:
    from stree.models.tree_lm import TreeLM

__all__ = ["check_prompts", "continue_prefill"]


def check_prompts(state: DecodeState, input_ids: Tensor, lengths: Tensor | None) -> list[int]:
    """Look at a caller's prompts and the state they shall fill; return the true lengths.

    Raises:
        ValueError: a wrong shape or dtype, an empty prompt, or one beyond the state's max_length.
        RuntimeError: the state is not empty.
    """
    batch = state.batch_size
    if not is_integer(input_ids) or input_ids.dim() != 2 or input_ids.shape[0] != batch:
        raise ValueError(f"input_ids must be int64[{batch}, length], got {describe(input_ids)}")
    if state.length_bound or state.pending is not None:
        raise RuntimeError("prefill needs an empty state; this one holds tokens already")
    width = input_ids.shape[1]
    if lengths is not None and (not is_integer(lengths) or lengths.shape != (batch,)):
        raise ValueError(f"lengths must be int[{batch}], got {describe(lengths)}")
    sizes = [width] * batch if lengths is None else lengths.tolist()
    if width == 0 or min(sizes) < 1:
        raise ValueError(f"every prompt needs at least one token, got lengths {sizes}")
    if max(sizes) > width:
        raise ValueError(f"lengths must be at most {width}, the width of input_ids, got {sizes}")
    if max(sizes) > state.max_length:
        raise ValueError(f"a prompt of {max(sizes)} tokens exceeds max_length {state.max_length}")
    return sizes


def continue_prefill(lm: TreeLM, state: DecodeState, input_ids: Tensor, lengths: Tensor, logits: Tensor) -> Tensor:
    """Run what a state has not seen of some prompts, as many tokens at a time as it and the kernels take nodes.

    Args:
        lm: the model.
        state: holds the first tokens of every prompt; the same number of them, or a prompt's all.
        input_ids: int64[batch, length], right-padded.
        lengths: int32[batch], true lengths.
        logits: float[batch, vocab], after the tokens that the state holds.

    Returns:
        float[batch, vocab], the logits after each prompt's last token.
    """
    rows = torch.arange(state.batch_size, device=input_ids.device)
    begin, longest = state.length_bound, int(lengths.max())
    most = min(state.max_nodes, most_nodes(lm.device, lm.dtype) or state.max_nodes)
    while begin < longest:
        n = min(most, longest - begin)
        index = torch.arange(n, dtype=torch.int32, device=input_ids.device)
        count = (lengths - begin).clamp(0, n)  # of a finished prompt none is left
        is_token = index < count[:, None]
        chain = input_ids[:, begin : begin + n].masked_fill(~is_token, 0)
        scored = lm.verify(state, TokenTree.unchecked(chain, torch.where(is_token, index - 1, -1).to(torch.int32)))
        last = scored[rows, (count - 1).clamp(min=0)]
        logits = torch.where(count[:, None] > 0, last.to(logits.device), logits)
        lm.commit(state, index.expand(len(rows), n), count)
        begin += n
    return logits
