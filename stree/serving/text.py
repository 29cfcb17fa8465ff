"""Text of tokens that arrive one by one: whole characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["IncrementalText"]

CONTEXT = 8  # tokens before the new ones, which decide on spaces between words
UNFINISHED = "�"  # what decoding writes for part of a character


class IncrementalText:
    """The text of one request, in pieces that never change again.

    Characters whose last byte has not come, and what may be the beginning of a stop string, are held back.

    Args:
        tokenizer: of transformers.
        prompt: token ids before the text.
        stops: strings that end the text and do not belong to it.

    Attributes:
        is_stopped: whether a stop string was found; nothing follows.
        text: all pieces so far.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = list(prompt[-CONTEXT:])
        self._begin, self._read = 0, len(self._ids)  # of the tokens that are decoded anew, and of those given out
        self._held = ""
        self.is_stopped, self.text = False, ""

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """Append tokens; return the next piece, which may be empty."""
        if self.is_stopped:
            return ""
        self._ids += tokens
        before, after = self._decoded(self._ids[self._begin : self._read]), self._decoded(self._ids[self._begin :])
        if is_last or not after.endswith(UNFINISHED):
            self._held += after[len(before) :]
            self._begin, self._read = max(self._read - CONTEXT, self._begin), len(self._ids)
        piece = self._cut(is_last=is_last)
        self.text += piece
        return piece

    def _cut(self, *, is_last: bool) -> str:
        """Take what is certain out of what is held back."""
        found = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.is_stopped = True
            return self._held[: min(found)]
        keep = 0 if is_last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return piece

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that is a proper beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
