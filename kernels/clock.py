"""A clock that leaves out the time in which code is compiled or loaded from a cache, and the clock of a device.

Speeds and times of steps are taken by it, so that they are the same in the first run on a machine and in later ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["begin_compiling", "clock", "compile_seconds", "compiling", "elapsed", "end_compiling", "mark", "wait_for"]

_lock = threading.Lock()
_depth = 0  # compilations that run now, one inside another or in several threads
_began = 0.0  # when the outermost one began
_seconds = 0.0  # of those that have ended


def clock() -> float:
    """Return the seconds of `time.perf_counter` without those in which any thread compiled."""
    with _lock:
        return (_began if _depth else time.perf_counter()) - _seconds


def compile_seconds() -> float:
    """Return the seconds in which any thread of this process compiled, so far."""
    with _lock:
        return _seconds + (time.perf_counter() - _began if _depth else 0.0)


def begin_compiling() -> None:
    """Stop the clock until `end_compiling` is called as often."""
    global _depth, _began
    with _lock:
        if not _depth:
            _began = time.perf_counter()
        _depth += 1


def end_compiling() -> None:
    """End what `begin_compiling` began."""
    global _depth, _seconds
    with _lock:
        _depth -= 1
        if not _depth:
            _seconds += time.perf_counter() - _began


@contextmanager
def compiling() -> Iterator[None]:
    """Leave the block out of what the clock measures."""
    begin_compiling()
    try:
        yield
    finally:
        end_compiling()


def mark(device: torch.device) -> Any:
    """Return the present time, for `elapsed`: that of `clock`, or on a GPU an event of the current stream."""
    if device.type != "cuda":
        return clock()
    # An external event is recorded anew by every replay of the graph that it is captured in.
    event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
    event.record(torch.cuda.current_stream(device))
    return event


def elapsed(begin: Any, end: Any) -> float:
    """Return the seconds between two marks; on a GPU, once the work before them has ended."""
    return float(end - begin if isinstance(begin, float) else 1e-3 * begin.elapsed_time(end))


def wait_for(device: torch.device) -> None:
    """Wait until a device has ended its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
