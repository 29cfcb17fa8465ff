"""Progress of commands: text on standard output; bars, or lines where it is no terminal, on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Progress", "RowProgress", "TextPrinter"]

LINE_S = 10.0  # between two lines of progress


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


class RowProgress:
    """Context that shows on standard error how many rows are done: a bar; in a file at most a line every 10 seconds.

    Args:
        total: rows.
        done: of them before.
    """

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress

        console = Console(stderr=True)
        self._total, self._done, self._written_s = total, done, 0.0
        self._bar = Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("rows", total=total, completed=done)

    def __enter__(self) -> RowProgress:
        self._bar.start()
        self._write_line()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._write_line()

    def advance(self) -> None:
        """Count a row."""
        self._done += 1
        self._bar.advance(self._task)
        if time.monotonic() - self._written_s >= LINE_S:
            self._write_line()

    def _write_line(self) -> None:
        if self._bar.disable:
            print(f"stree: {self._done} of {self._total} rows", file=sys.stderr, flush=True)
            self._written_s = time.monotonic()


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
