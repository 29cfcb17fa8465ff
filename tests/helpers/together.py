"""Calls of one function in several threads that begin at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["together"]

R = TypeVar("R")


def together(call: Callable[[int], R], threads: int) -> list[R]:
    """Return ``call(number)`` of each thread; the first exception of one is raised."""
    barrier = threading.Barrier(threads)

    def work(number: int) -> R:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(work, range(threads))]
