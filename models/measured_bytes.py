"""Bytes that running a model without values was measured to take, kept with the model and on disk.

A measurement runs a forward on ``meta``, which takes 0.1 s and more, and depends on the sizes, the model's class and
configuration, and the code that runs; a later process reads it from a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from stree.models.passed_checks import cache_folder, code_digest

__all__ = ["measured_bytes"]

logger = logging.getLogger("stree")


def measured_bytes(what: str, lm: Any, sizes: tuple[Any, ...], measure: Callable[[], int]) -> int:
    """Return what a measurement gave the first time, or 0 for a model whose forward needs values.

    Args:
        what: name of the measurement.
        lm: the model, an object such as ``TreeLM``.
        sizes: what its result depends on beside the model, with a ``repr`` that names it.
        measure: makes it.
    """
    attention = getattr(lm.model.config, "_attn_implementation", None)
    key = what, attention, lm.dtype, lm.device.type, *sizes
    count: int | None = lm.cache.get(key)
    if count is None:
        count = lm.cache[key] = _from_disk(key, lm, measure)
    return count


def _from_disk(key: tuple[Any, ...], lm: Any, measure: Callable[[], int]) -> int:
    """Read a measurement of another process, or make it and write it down."""
    key = *key, lm.model.config.to_json_string(), type(lm.model)
    digest = code_digest(key, {type(lm.model), *map(type, lm.mixers.values())}, lm.device)
    file = None if digest is None else cache_folder() / "memory" / digest
    if file is not None:
        with suppress(OSError, ValueError):
            return int(file.read_text())
    try:
        count = measure()
    except Exception as problem:
        logger.debug("the memory of a %s is not checked: %s: %s", key[0], type(problem).__name__, problem)
        return 0
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(count))
    return count
