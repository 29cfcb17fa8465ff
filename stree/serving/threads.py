"""Loading models outside of the threads that live on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_own_thread"]

T = TypeVar("T")


def in_own_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread that ends then, and return its result.

    The OpenMP runtime of torch keeps worker threads for every thread that has run a parallel operation.  Where they and
    those of the engine's thread are more than the cores, all of them sleep between operations, which costs a CPU a
    third of its tokens a second.  So a server loads its models, and checks them, in a thread that ends.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="stree loading") as pool:
        return pool.submit(work).result()
