"""Times of modules inside a model's forward over trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stree.decode.step_result import StepTimer
from stree.kernels.clock import wait_for
from stree.models.tree_step import TreeStep

__all__ = ["ModuleTimer"]


class ModuleTimer:
    """Times of modules while a model scores trees, by name: seconds, on a device from events.

    Args:
        model: the target's model, within whose forward passes over trees its output head is timed.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._head = model, model.get_output_embeddings()
        self._spans = StepTimer(model.device)
        self._open: dict[int, StepTimer] = {}

    @contextmanager
    def over(self, modules: Sequence[tuple[str, Any]]) -> Iterator[None]:
        """Time modules, each under a name."""
        handles = []
        for name, module in modules:
            handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True),
                module.register_forward_hook(self._ender(name)),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def seconds(self, names: Sequence[str]) -> dict[str, float]:
        """Sum the spans of each name."""
        wait_for(self._model.device)
        seconds = self._spans.seconds()
        return {name: seconds.get(name, 0.0) for name in names}

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        """Start a span if a tree is scored; prompts are not timed."""
        scores = any(isinstance(value, TreeStep) for value in (*args, *kwargs.values()))
        if scores or (module is self._head and id(self._model) in self._open):
            self._open[id(module)] = StepTimer(self._model.device)

    def _ender(self, name: str) -> Callable[..., None]:
        def end(module: Any, *_: Any) -> None:
            if (timer := self._open.pop(id(module), None)) is not None:
                timer.lap(name)
                self._spans.include(timer)

        return end
