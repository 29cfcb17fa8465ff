"""Running the prompt of one request, a chunk at a time, so that running requests go on in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stree.decode.memory import Extent, fits_in_memory
from stree.decode.prompts import PrefilledPrompt
from stree.drafters import Drafter
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.serving.prefix_cache import KeptPrefix, PrefixCache

__all__ = ["Prefill", "default_chunk"]

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


class Prefill:
    """The prompt of one request, which starts from the longest state that was kept.

    Args:
        lm: the target.
        prompt: its tokens.
        state: an empty one of one row.
        hidden_layers: layers of the target that the drafter reads, or None.
        cache: of earlier texts.

    Attributes:
        num_cached: tokens that were not run again.
        epoch: of the cache, when it began.
    """

    def __init__(
        self, lm: TreeLM, prompt: Sequence[int], state: DecodeState, hidden_layers: Sequence[int] | None,
        cache: PrefixCache,
    ) -> None:  # fmt: skip
        self._lm, self._prompt, self._layers, self._cache = lm, prompt, hidden_layers, cache
        self.epoch = cache.epoch
        kept = cache.longest(prompt, needs_hidden=hidden_layers is not None)
        self._state, self._logits, self._hidden = state, None, list[Tensor]()
        self.num_cached = 0
        if kept is not None:
            self._state, self._logits, self.num_cached = kept.state.clone(), kept.logits, len(kept.tokens)
            self._hidden += [] if kept.hidden is None else [kept.hidden]
        self._done = self.num_cached

    def run_chunk(self, size: int) -> PrefilledPrompt | None:
        """Run at most ``size`` tokens; return the result after the last one."""
        piece = torch.tensor([self._prompt[self._done : self._done + size]])
        if piece.numel():
            run = self._lm.extend if self._done else self._lm.prefill
            if self._layers is None:
                self._logits = run(self._state, piece)
            else:
                self._logits, hidden = run(self._state, piece, hidden_layers=self._layers)
                self._hidden.append(hidden)
            self._done += piece.shape[1]
        if self._done < len(self._prompt):
            return None
        assert self._logits is not None, "a state without logits leaves tokens to run"
        hidden_states = torch.cat(self._hidden, 1) if self._layers is not None else None
        if self._cache.max_bytes:
            self._cache.put(KeptPrefix(tuple(self._prompt), self._state, self._logits, hidden_states), self.epoch)
        return PrefilledPrompt(self._state, self._logits, hidden_states)
