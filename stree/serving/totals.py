"""Sums over the requests of an engine, which move with every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

__all__ = ["Listener", "Totals"]

NAMES = (
    "requests", "ended", "drafting_failures", "prompt_tokens", "queried_tokens", "cached_tokens", "new_tokens", "steps",
    "drafted", "accepted",
)  # fmt: skip
DEPTHS = 16  # of accepted tokens, whose counts are there from the beginning


class Listener(Protocol):
    """Is called in the engine's thread with the statistics of a request, and must not raise."""

    def on_tokens(self, first_s: float, gap_s: float | None) -> None:
        """A step has emitted tokens, ``gap_s`` after the one before it; None for the first, at ``first_s``."""

    def on_end(self, stats: Mapping[str, Any], reason: str) -> None:
        """A request has ended."""


class Totals:
    """The engine's thread adds, but for ``requests``; any thread reads.

    Attributes:
        sums: over all requests so far.
        accepted_at: accepted tokens by their depth in the tree, from the children of its root.
        num_threads: CPU threads of torch in the engine's thread, at its last step.
        listeners: called with every step and end; replaced as a whole.
    """

    def __init__(self) -> None:
        self.sums = dict.fromkeys(NAMES, 0)
        self.accepted_at = [0] * DEPTHS
        self.num_threads = torch.get_num_threads()
        self.listeners: tuple[Listener, ...] = ()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self.sums["requests"] - self.sums["ended"]

    def prompt(self, tokens: int, queried: int, cached: int) -> None:
        """Count a prompt that has been run, and its tokens that were looked up and found in the prefix cache."""
        for name, count in (("prompt_tokens", tokens), ("queried_tokens", queried), ("cached_tokens", cached)):
            self.sums[name] += count

    def tokens(self, first_s: float, new: int, *, steps: int, drafted: int, accepted: int, gap_s: float | None) -> None:
        """Count what a step has emitted for a request."""
        self.num_threads = torch.get_num_threads()  # each thread of Python has a number of its own
        for name, count in (("new_tokens", new), ("steps", steps), ("drafted", drafted), ("accepted", accepted)):
            self.sums[name] += count
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for depth in range(accepted):
            self.accepted_at[depth] += 1
        for listener in self.listeners:
            listener.on_tokens(first_s, gap_s)

    def end(self, stats: Mapping[str, Any], reason: str) -> None:
        """Count the end of a request."""
        self.sums["ended"] += 1
        self.sums["drafting_failures"] += stats["drafting_problem"] is not None
        for listener in self.listeners:
            listener.on_end(stats, reason)
