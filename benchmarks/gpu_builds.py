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
from pathlib import Path

from stree.bench.records import Record

__all__ = ["build"]


def build(script: Path, arguments: Sequence[str], deadline: float) -> Record:
    """Run a script's shares side by side, for at most half of the time that is left.

    Args:
        script: that knows ``--minutes`` and ``--build-share``.
        arguments: what it is to build.
        deadline: by ``time.monotonic()``; a process that has not ended then is killed.

    Returns:
        How many processes, their exit statuses, and seconds.  A build that fails fails once more, and is reported, when
        it is timed.
    """
    began, count = time.monotonic(), max(1, (os.cpu_count() or 2) - 2)
    own = [sys.executable, str(script.resolve()), *arguments, "--minutes", f"{max(deadline - began, 0) / 120:.3f}"]
    workers = [subprocess.Popen([*own, "--build-share", str(share), str(count)]) for share in range(count)]
    codes = [_ended(worker, deadline) for worker in workers]
    return {"bench": "builds", "processes": count, "exit": codes, "seconds": time.monotonic() - began}


def _ended(worker: subprocess.Popen[bytes], deadline: float) -> int:
    """Wait for a process, until the time is up; give its exit status."""
    try:
        return worker.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
