"""Calls of the command line in this process, one function in several threads at once, and a disk that is full."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from stree.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with ``--json``; return its last line."""
    assert main([*arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that ends with status 2; return what it says."""
    assert main([*arguments]) == 2
    return capsys.readouterr().err


R = TypeVar("R")


def together(call: Callable[[int], R], threads: int) -> list[R]:
    """Return ``call(number)`` of each thread; the first exception of one is raised."""
    barrier = threading.Barrier(threads)

    def work(number: int) -> R:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(threads) as pool:
        return [*pool.map(work, range(threads))]


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond a size in bytes; a write takes what still fits, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
