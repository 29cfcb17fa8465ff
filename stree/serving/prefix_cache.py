"""States of texts that were run, from which requests that continue them start."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stree.models.state import DecodeState

__all__ = ["KeptPrefix", "PrefixCache"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """The state after a text.

    Attributes:
        tokens: of the text.
        state: of one row, which has read all of them.
        logits: float[1, vocab], of the next token; None where they are not known.
        hidden: float[1, n, layers, hidden], hidden states of the text that a draft head reads, or None.
    """

    tokens: tuple[int, ...]
    state: DecodeState
    logits: Tensor | None
    hidden: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return self.state.num_bytes + sum(part.nbytes for part in (self.logits, self.hidden) if part is not None)


class PrefixCache:
    """A least-recently-used cache of states, bounded by bytes.

    A recurrent state cannot be taken back, so a text starts from a state only if it begins with all of its tokens.
    Threads may share a cache.

    Args:
        max_bytes: of all states together; 0 keeps none.

    Attributes:
        epoch: how often it was cleared.  A state is kept only if nothing was cleared since its text began.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.epoch = max_bytes, 0, 0
        self._kept: OrderedDict[tuple[int, ...], KeptPrefix] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, prefix: KeptPrefix, epoch: int) -> None:
        """Keep a state, in place of those that were not used for longest, whose text began in an epoch."""
        with self._lock:
            if epoch != self.epoch:
                return
            old = self._kept.pop(prefix.tokens, None)
            self.num_bytes -= 0 if old is None else old.num_bytes
            if prefix.num_bytes > self.max_bytes:
                return
            self._kept[prefix.tokens] = prefix
            self.num_bytes += prefix.num_bytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def longest(self, tokens: Sequence[int], *, needs_hidden: bool) -> KeptPrefix | None:
        """Return the longest state from which a text can start: one that has its next logits, or leaves tokens to run.

        Args:
            tokens: of the text.
            needs_hidden: whether the hidden states of the whole text are needed.
        """
        with self._lock:
            fitting = [
                kept
                for kept in self._kept.values()
                if (kept.hidden is not None or not needs_hidden)
                and len(kept.tokens) + (kept.logits is None) <= len(tokens)
                and kept.tokens == tuple(tokens[: len(kept.tokens)])
            ]
            if not fitting:
                return None
            best = max(fitting, key=lambda kept: len(kept.tokens))
            self._kept.move_to_end(best.tokens)
            return best

    def clear(self) -> None:
        """Drop all states, and keep none of the texts that run now."""
        with self._lock:
            self._kept.clear()
            self.num_bytes, self.epoch = 0, self.epoch + 1
