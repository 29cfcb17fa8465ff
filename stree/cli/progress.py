"""Streamers of commands: text on standard output, or a progress bar of new tokens on standard error."""

from __future__ import annotations

from typing import Any

__all__ = ["Progress", "TextPrinter"]


class Progress:
    """A streamer that shows a progress bar on standard error instead of text."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("generating", total=total)
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Count new tokens; the first call brings the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            self._bar.start()
        else:
            self._bar.advance(self._task, len(value))

    def end(self) -> None:
        """Take the bar away."""
        self._bar.stop()


class TextPrinter:
    """A streamer that prints a prompt, and the text of new tokens as they come, without special tokens.

    Args:
        tokenizer: of transformers, whose own ``TextStreamer`` strips a space after each line of SentencePiece's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text: Any = None

    def put(self, value: Any) -> None:
        """Print the next tokens; the first call brings the prompt."""
        from stree.decode.text import IncrementalText

        tokens = value.tolist()
        if self._text is None:
            self._text = IncrementalText(self._tokenizer, tokens)
            print(self._tokenizer.decode(tokens), end="", flush=True)
        else:
            print(self._text.push(tokens), end="", flush=True)

    def end(self) -> None:
        """End the line."""
        print("" if self._text is None else self._text.push([], is_last=True))
