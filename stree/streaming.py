"""``stream``, which users call: the tokens of one text, or its characters, as they are emitted."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from stree.checks import NotCopied
from stree.decode.batching import batch_for
from stree.decode.loop import DecodeLoop
from stree.decode.settings import Settings
from stree.decode.stats import Generation
from stree.decode.text import IncrementalText
from stree.drafters import Drafter
from stree.generation import Prompts, decode_steps, generate
from stree.models.tree_lm import TreeLM

__all__ = ["TokenStream", "stream"]

SEVERAL = {"streamer", "max_batch", "num_samples"}  # options of ``generate`` that make no sense of one streamed text


class TokenStream(NotCopied, Iterator[int]):
    """The new tokens of one text, one by one.  A step emits several at once, so some come without a wait.

    ``close()``, or dropping the iterator, ends the text as cancelled and frees its memory.  Threads may share a stream:
    each token goes to one of them, and ``close`` waits for the step that runs.

    Attributes:
        result: what ``generate`` returns, of the text so far.
        stats: its statistics.
    """

    def __init__(self, steps: Generator[DecodeLoop, None, Generation]) -> None:
        self._steps: Generator[DecodeLoop, None, Generation] | None = steps
        self._loop: DecodeLoop | None = next(steps)  # checks the arguments
        self._result = self._loop.output("length")
        self._next = 0
        self._lock = threading.RLock()

    def __next__(self) -> int:
        with self._lock:
            while self._next >= len(new := self._new_tokens()):
                if self._steps is None:
                    raise StopIteration
                self._advance()
            self._next += 1
            return new[self._next - 1]

    def text(self, tokenizer: Any) -> Iterator[str]:
        """Yield the text of the tokens as they come, in pieces of whole characters, special tokens left out.

        Args:
            tokenizer: of transformers, of the target.
        """
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise TypeError(f"tokenizer must be transformers' tokenizer of the target, got {tokenizer!r:.80}")
        text = None
        for token in self:
            if text is None:
                tokens, new = self.result.sequences[0], self.result.new_tokens[0]
                text = IncrementalText(tokenizer, tokens[: len(tokens) - len(new) + self._next - 1])
            if piece := text.push([token]):
                yield piece
        if text is not None and (piece := text.push([], is_last=True)):
            yield piece

    @property
    def result(self) -> Generation:
        """What was generated so far; after the end, all of it."""
        with self._lock:
            return self._result if self._loop is None else self._loop.output("running")

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the text so far."""
        return self.result.stats

    def close(self) -> None:
        """End the text; ``result`` also has the tokens of its last step that were not taken."""
        with self._lock:
            if self._steps is not None and self._loop is not None:
                self._steps.close()
                self._finish(self._loop.output("cancelled"))
            self._next = len(self._new_tokens())

    def _new_tokens(self) -> list[int]:
        """New tokens of the text so far."""
        if self._loop is not None:
            return next((sequence.new for sequence in self._loop.sequences.all), [])
        return next(iter(self._result.new_tokens), [])

    def _advance(self) -> None:
        """Take a step."""
        assert self._steps is not None and self._loop is not None
        try:
            next(self._steps)
        except StopIteration as end:
            self._finish(end.value)
        except BaseException:
            self._finish(self._loop.output("error"))
            raise

    def _finish(self, result: Generation) -> None:
        self._result, self._loop, self._steps = result, None, None


def stream(
    lm: TreeLM, prompt: Prompts, drafter: Drafter | TreeLM | str | Path | None = None, **options: Any
) -> TokenStream:
    """Generate one text and give its tokens as they are emitted: ``for token in stree.stream(lm, prompt): ...``.

    ``for piece in stree.stream(lm, prompt).text(tokenizer): ...`` gives its text.

    Args:
        lm: the target.
        prompt: as ``prompts`` of ``generate``, but one.
        drafter: as for ``generate``.
        options: those of ``generate`` that concern one text.

    Raises:
        ValueError: an argument outside its range, or several prompts.
        TypeError: another option.
    """
    known = inspect.signature(generate).parameters.keys() - SEVERAL
    other = next((name for name in options if name not in known), None)
    if other is not None:
        raise TypeError(f"stream takes generate's options for one text, got {other}")
    shared = inspect.signature(Settings).parameters.keys() & options.keys()
    settings = Settings(lm, drafter, **{name: options.pop(name) for name in shared})
    return TokenStream(decode_steps(settings, batch_for(lm, prompt, most_prompts=1, **options)))
