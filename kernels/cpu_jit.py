"""The options by which numba compiles all functions of the package, its cache, and the time that it takes.

Machine code is kept in the first folder that can be written of NUMBA_CACHE_DIR, ``__pycache__`` beside the source file,
and numba's folder of the user; where none can be, every process compiles anew.  Importing numba takes part of a second,
so files that use it are imported with the first tree or text.
"""

# mypy: disable-error-code="untyped-decorator, misc, attr-defined"

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from stree.kernels.clock import begin_compiling, compiling, end_compiling

with compiling():
    from numba import carray, njit
    from numba.core import event, sigutils, types
    from numba.core.caching import FunctionCache
    from numba.extending import intrinsic, overload

__all__ = ["ZEROS", "array_at", "array_of", "compiled", "inner", "overload"]

ZEROS = {4: np.float32(0), 8: np.float64(0)}  # by bytes of a number: `array_at` takes the dtype from one of them

logger = logging.getLogger("stree")


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile a function that is called from Python, for the types of its arguments, when it is first called.

    It is a decorator, also with ``options``, which are those of ``njit``.
    """
    if function is None:
        return partial(compiled, **options)
    dispatcher = njit(error_model="numpy", **options)(function)
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _warn_of_no_cache("no folder can be written")
    return dispatcher


class _Cache(FunctionCache):
    """numba's cache of a function, whose files may be damaged, or on a disk that is full: then it is compiled anew."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the machine code for a signature, or None; a cache with damaged files is emptied.

        Processes that compile a function at once for two signatures may name both files alike, and one then remains.
        """
        with suppress(Exception):  # pickle raises anything
            found = super().load_overload(sig, target_context)
            if found is None or found.signature.args == sigutils.normalize_signature(sig)[0]:
                return found
        with suppress(OSError):
            self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the machine code for a signature, if it can be written."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_of_no_cache(str(error))


@cache
def _warn_of_no_cache(cause: str) -> None:
    """Log a cause once."""
    logger.warning("numba keeps no compiled code: %s; set NUMBA_CACHE_DIR to a folder that can be written", cause)


def inner(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function which compiled functions call; ``options`` are those of ``njit``."""
    decorator: Callable[[Callable[..., Any]], Any] = njit(error_model="numpy", **options)
    return decorator


def array_of(tensor: Tensor, like: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor as an array of the dtype of another: the memory itself where it has that dtype."""
    array: np.ndarray[Any, Any] = tensor.detach().to(like.dtype).numpy()
    return array


@intrinsic
def _pointer(typing: Any, address: Any, zero: Any) -> Any:
    """Turn an address into a pointer to numbers of a type."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(zero)(address, zero), generate


@inner(inline="always")
def array_at(address: int, shape: Any, zero: Any) -> Any:
    """Return the contiguous array of a shape at an address, of the type of ``zero``, for compiled code.

    ``Tensor.data_ptr`` takes a tenth of the time of ``Tensor.numpy``.  The caller keeps the tensor.
    """
    return carray(_pointer(address, zero), shape)


class _StopClock(event.Listener):
    """Stops the clock while numba compiles, or loads what it has compiled."""

    def on_start(self, event: Any) -> None:
        begin_compiling()

    def on_end(self, event: Any) -> None:
        end_compiling()


event.register("numba:compiler_lock", _StopClock())
