"""A progress bar of new tokens on standard error."""

from __future__ import annotations

from typing import Any

__all__ = ["Progress"]


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
