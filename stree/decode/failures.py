"""What ends a generation early, raised together with the text that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stree.decode.loop import DecodeLoop
from stree.decode.stats import Generation
from stree.models.loading import reason_of

__all__ = ["GenerationError", "GenerationInterrupted", "failures_with_output"]


class GenerationError(RuntimeError):
    """The drafter, the model or a streamer failed.

    Attributes:
        output: what was generated: before the failure, or, where only the drafter failed, everything, as the rest is
            then decoded without it.
    """

    def __init__(self, message: str, output: Generation) -> None:
        super().__init__(message, output)  # both, so that it can be pickled
        self.output = output

    def __str__(self) -> str:
        return str(self.args[0])


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C; ``output`` holds what was generated before."""

    def __init__(self, output: Generation) -> None:
        super().__init__(output)
        self.output = output

    def __str__(self) -> str:
        return "generation interrupted"


@contextmanager
def failures_with_output(loop: DecodeLoop, state_size: Callable[[], str]) -> Iterator[None]:
    """Raise what ends a generation together with the text that it has; before the first token, as it is."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise GenerationInterrupted(loop.output("interrupted")) from interrupt
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if is_memory and loop.step_cache is not None:
            loop.step_cache.release()
        if not (loop.is_started or is_memory):
            raise
        message = f"generation failed after {loop.sequences.num_new_tokens} new tokens: {reason_of(error)}"
        if is_memory:
            message += f"; the target's state takes {state_size()}; lower max_batch, max_length or budget"
        raise GenerationError(message, loop.output("error")) from error
