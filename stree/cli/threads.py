"""How many CPU threads torch uses: one for every 32 MiB of weights, and no more than other processes leave cores.

A step of a small model has hundreds of operations that take microseconds each, and ends each of them when the last
thread has done its part.  A thread whose core another process uses waits milliseconds for its turn, so two threads on
two busy cores are many times slower than one, and on two idle cores they are faster: 1.1 times with 24 MB of weights,
1.5 times with 540 MB, which take most of a step's time (docs/choosing.md).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

__all__ = ["SET_BY_USER", "CoreUse", "FreeCores", "cores_of_container", "threads_for", "threads_worth"]

logger = logging.getLogger("stree")

# Variables by which a user says how torch's threads run; with one of them nothing is changed.
SET_BY_USER = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
)  # fmt: skip
PERIOD_S = 1.0  # over which the use of cores is measured at least
BYTES_OF_THREAD = 32 << 20  # of weights, below which another thread saves less than a busy core costs
BACKGROUND = 0.2  # cores that others may use without a thread less
LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time, or "max", in a period


@dataclass(frozen=True, slots=True)
class CoreUse:
    """The use of the cores that this process may run on, until now.

    Attributes:
        time_s: when it was read.
        idle_s: seconds that the cores were idle, summed over them.
        own_s: seconds of CPU time of this process.
    """

    time_s: float
    idle_s: float
    own_s: float

    @staticmethod
    def now() -> CoreUse:
        """Read it."""
        times = psutil.cpu_times(percpu=True)
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
        idle_s = sum(core.idle + getattr(core, "iowait", 0.0) for place, core in enumerate(times) if place in allowed)
        return CoreUse(time.perf_counter(), idle_s, time.process_time())


def threads_for(before: CoreUse, after: CoreUse, most: int) -> int:
    """Return how many threads have a core for themselves: 1 to ``most``."""
    free = (after.idle_s - before.idle_s + after.own_s - before.own_s) / max(after.time_s - before.time_s, 1e-9)
    return min(most, max(1, int(free + BACKGROUND)))


def threads_worth(weight_bytes: int) -> int:
    """Return for how many threads weights of so many bytes are work enough, at least 1."""
    return max(1, weight_bytes // BYTES_OF_THREAD)


def cores_of_container(limit: Path = LIMIT) -> float:
    """Return how many cores' time a container may use; infinity where it has no limit."""
    try:
        quota, period = limit.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")


class FreeCores:
    """Sets torch's threads by the cores that other processes have left free since the last time.

    Nothing is changed where the environment says how many threads there are, or how they wait.

    Args:
        read: returns the use of cores until now.
        limit: the cores that this process may use at most.
    """

    def __init__(self, read: Callable[[], CoreUse] = CoreUse.now, limit: float | None = None) -> None:
        self._read, self._is_set = read, any(name in os.environ for name in SET_BY_USER)
        limit = cores_of_container() if limit is None else limit
        self._most = int(max(1, min(torch.get_num_threads(), limit)))
        self._before = read()

    def fit(self, weights: Iterable[torch.Tensor]) -> None:
        """Use no more threads from the next ``adapt`` on than these weights of a target are worth."""
        self._most = min(self._most, threads_worth(sum(weight.nbytes for weight in weights)))

    def adapt(self) -> None:
        """Set the number of threads of the calling thread's operations, at most once in PERIOD_S."""
        if self._is_set or time.perf_counter() < self._before.time_s + PERIOD_S:
            return
        before, self._before = self._before, self._read()
        threads = threads_for(before, self._before, self._most)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
            logger.info("torch runs on %d thread(s) from now on", threads)
