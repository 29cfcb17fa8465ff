"""States of texts that were run, from which texts that begin alike start."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.checks import integer
from stree.models.state import DecodeState
from stree.tree import TokenTree

__all__ = ["KeptPrefix", "PrefixCache", "PromptRun", "RequestPrefixes"]

# Least tokens between the state that a prompt starts from and another one that is kept: where an earlier text goes
# another way, and after those that the request calls shared.
MIN_BRANCH_TOKENS, MIN_SHARED_TOKENS = 64, 16


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """The state of a model after a text.

    Attributes:
        tokens: int64[n], of the text.
        state: of one row, which has read all of them; it has no room for more.
        logits: float[1, vocab], of the next token; None where they are not known.
        hidden: float[1, n, layers, hidden], hidden states of the text that a draft head reads, or None.
    """

    tokens: np.ndarray
    state: DecodeState
    logits: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def key(self) -> tuple[int, bytes]:
        """Which model has read which text."""
        return id(self.state.specs), self.tokens.tobytes()

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        tensors = sum(part.nbytes for part in (self.logits, self.hidden) if part is not None)
        return self.state.num_bytes + self.tokens.nbytes + tensors


class PrefixCache:
    """A least-recently-used cache of states, bounded by bytes, of target and draft models.

    A recurrent state cannot be taken back, so a text starts from a state only if it begins with all of its tokens.
    Threads may share a cache.

    Args:
        max_bytes: of all states together; 0 keeps none.

    Attributes:
        epoch: how often it was cleared.  A state is kept only if nothing was cleared since its text began.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.epoch = max_bytes, 0, 0
        self._kept: OrderedDict[tuple[int, bytes], KeptPrefix] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, prefix: KeptPrefix, epoch: int) -> None:
        """Keep a state, in place of those that were not used for longest, whose text began in an epoch."""
        with self._lock:
            if epoch != self.epoch:
                return
            old = self._kept.pop(prefix.key, None)
            self.num_bytes -= 0 if old is None else old.num_bytes
            if old is not None and prefix.logits is None:
                prefix = old  # a request of one new token leaves no next logits, which the older state has
            if prefix.num_bytes > self.max_bytes:
                return
            self._kept[prefix.key] = prefix
            self.num_bytes += prefix.num_bytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def longest(self, specs: Any, tokens: np.ndarray, *, needs_hidden: bool) -> tuple[KeptPrefix | None, int]:
        """Return the longest state from which a text can start, and how many tokens it has in common with any text.

        Args:
            specs: of the model's states.
            tokens: int64[n], of the text; a state of all of them must have its next logits.
            needs_hidden: whether the hidden states of the whole text are needed.
        """
        with self._lock:
            text, best, shared = tokens.tobytes(), None, 0
            for kept in self._kept.values():
                if kept.state.specs is not specs:
                    continue
                size = len(kept.tokens)
                is_whole = text.startswith(kept.key[1])
                shared = max(shared, size if is_whole else _common_length(kept.tokens, tokens))
                has_all = (kept.hidden is not None or not needs_hidden) and size + (kept.logits is None) <= len(tokens)
                if is_whole and has_all and (best is None or size > len(best.tokens)):
                    best = kept
            if best is not None:
                self._kept.move_to_end(best.key)
            return best, shared

    def clear(self) -> None:
        """Drop all states, and keep none of the texts that run now."""
        with self._lock:
            self._kept.clear()
            self.num_bytes, self.epoch = 0, self.epoch + 1


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Count the tokens with which both begin."""
    size = min(len(first), len(second))
    if size <= MIN_BRANCH_TOKENS or first[MIN_BRANCH_TOKENS] != second[MIN_BRANCH_TOKENS]:  # most texts differ early
        return 0
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass(slots=True)
class RequestPrefixes:
    """One request's use of the cache.

    Attributes:
        cache: shared with other requests.
        shared: first tokens of the prompt that other requests begin with, too, such as a system prompt; 0 if unknown.
        epoch: of the cache when the prompt began to run.
    """

    cache: PrefixCache
    shared: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        """Check the number of shared tokens."""
        self.shared = integer("num_shared", self.shared)
        if self.shared < 0:
            raise ValueError(f"num_shared must not be negative, got {self.shared}")

    def begin(self) -> None:
        """Note the epoch: the prompt begins to run."""
        self.epoch = self.cache.epoch

    @property
    def keeps(self) -> bool:
        """Whether the cache has room for anything."""
        return self.cache.max_bytes > 0

    def keep(self, tokens: np.ndarray, state: DecodeState, *outputs: Tensor | None) -> None:
        """Copy into the cache the state of one row after int64[n] tokens, with logits and hidden states if given."""
        self.cache.put(KeptPrefix(tokens, state.resized(len(tokens), 1), *outputs), self.epoch)


class PromptRun:
    """The prefill of one prompt, from the longest state in the cache that it begins with.

    States are kept after the whole prompt, after the tokens that the request calls shared, and where the prompt departs
    from an earlier text.

    Args:
        lm: the model, a TreeLM.
        prompt: tokens, at least one.
        state: an empty one of one row.
        prefixes: of the request.
        hidden_layers: layers whose hidden states are returned, or None.
        on_logits: called with float[1, m, vocab] logits and the int64[1, m] tokens that follow in the prompt, in turn
            for the whole prompt.  The prompt then runs as chains of nodes, from its beginning; None: prefill.

    Attributes:
        state: after the tokens that have run.
        prefixes: of the request.
        logits: float[1, vocab], of the next token, once all tokens have run.
        num_cached: tokens that were not run.
    """

    logits: Tensor

    def __init__(
        self, lm: Any, prompt: Sequence[int], state: DecodeState, prefixes: RequestPrefixes,
        hidden_layers: Sequence[int] | None = None, on_logits: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        self._lm, self.state, self.prefixes, self._on_logits = lm, state, prefixes, on_logits
        self._layers = {} if hidden_layers is None else {"hidden_layers": hidden_layers}
        self._tokens = np.asarray(prompt, np.int64)
        self._hidden = list[Tensor]()
        kept, branch = prefixes.cache.longest(state.specs, self._tokens, needs_hidden=hidden_layers is not None)
        kept = kept if on_logits is None else None
        self.num_cached = 0 if kept is None else len(kept.tokens)
        if kept is not None:
            state.overwrite(kept.state)
            self.logits = state.lengths.new_zeros(0) if kept.logits is None else kept.logits
            self._hidden += [] if kept.hidden is None else [kept.hidden]
        self._done = self.num_cached
        leasts = (branch, MIN_BRANCH_TOKENS), (min(prefixes.shared, len(prompt)), MIN_SHARED_TOKENS)
        borders = {border for border, least in leasts if prefixes.keeps and border >= self._done + least}
        self._borders = sorted({len(prompt)} | borders)

    @property
    def hidden(self) -> Tensor | None:
        """Hidden states of the tokens that have run, float[1, n, layers, hidden], where they are wanted."""
        return torch.cat(self._hidden, 1) if self._layers else None

    def run(self, size: int | None = None) -> bool:
        """Run at most ``size`` tokens, up to the next border, or all that are left; return whether all have run."""
        run = self._prefill if self._on_logits is None else self._score
        while self._done < len(self._tokens):
            border = next(border for border in self._borders if border > self._done)
            end = border if size is None else min(border, self._done + size)
            self._done = run(end)
            if self._done == border and self.prefixes.keeps:
                self.prefixes.keep(self._tokens[:border], self.state, self.logits, self.hidden)
            if size is not None:
                break
        return self._done == len(self._tokens)

    def _prefill(self, end: int) -> int:
        """Run the tokens before ``end``; return how many have run."""
        run = self._lm.extend if self._done else self._lm.prefill
        self.logits = self._without_hidden(run(self.state, self._piece(self._done, end), **self._layers))
        return end

    def _score(self, end: int) -> int:
        """Score the tokens before ``end``, as many as a tree may have, and commit them; return how many have run."""
        end = min(end, self._done + self.state.max_nodes)
        chain = TokenTree.chain(self._piece(self._done, end))
        logits = self._without_hidden(self._lm.verify(self.state, chain, **self._layers))
        path = torch.arange(end - self._done, dtype=torch.int32, device=logits.device)[None]
        self._lm.commit(self.state, path, torch.full_like(self.state.lengths, path.shape[1]))
        following = self._piece(self._done + 1, end + 1).to(logits.device)
        assert self._on_logits is not None, "prompts are scored for it"
        self._on_logits(logits[:, : following.shape[1]], following)
        self.logits = logits[:, -1]
        return end

    def _piece(self, begin: int, end: int) -> Tensor:
        """Return some tokens of the prompt, int64[1, m]."""
        return torch.from_numpy(self._tokens[None, begin:end])

    def _without_hidden(self, outputs: Any) -> Tensor:
        """Return the logits of a forward, and put its hidden states, if any, beside the earlier ones."""
        if not self._layers:
            return outputs  # type: ignore[no-any-return]
        logits, hidden = outputs
        self._hidden.append(hidden)
        return logits  # type: ignore[no-any-return]
