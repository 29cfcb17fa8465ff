"""Several processes build kernels before one process times them: most of a run's time would be builds otherwise.

A script that is given ``--build-share I N`` launches every N-th of what it would time, untimed, from the I-th on; what
it builds stays in Triton's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from stree.bench.records import Record

__all__ = ["build"]


def build(module: str, arguments: Sequence[str], deadline: float) -> Record:
    """Run all shares of a script side by side, for at most half of the time that is left.

    Args:
        module: a script with the options ``--minutes`` and ``--build-share``.
        arguments: its other options.
        deadline: by ``time.monotonic()``; a process that has not ended then is killed.

    Returns:
        Number of processes, their exit statuses, and seconds.  A build that fails fails again, and is reported, when it
        is timed.
    """
    began, count = time.monotonic(), max(1, (os.cpu_count() or 2) - 2)
    minutes = f"{max(deadline - began, 0) / 120:.3f}"
    command = [sys.executable, "-m", module, *arguments, "--minutes", minutes]
    workers = [subprocess.Popen([*command, "--build-share", str(share), str(count)]) for share in range(count)]
    return {
        "bench": "builds",
        "processes": count,
        "exit": [_exit_status(worker, deadline) for worker in workers],
        "seconds": time.monotonic() - began,
    }


def _exit_status(worker: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return worker.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
