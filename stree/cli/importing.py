"""Importing large libraries without garbage collection."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["import_models", "without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """Import in the block what a command needs: collections take a fifth of the time of importing transformers.

    What was imported stays until the process ends, so collections do not look at it before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
            atexit.register(gc.unfreeze)  # extension modules report what the last collection leaves


def import_models() -> None:
    """Import what every command that generates needs of transformers and of this package."""
    with without_collection():
        from transformers import AutoTokenizer  # noqa: F401

        import stree.warming  # noqa: F401
