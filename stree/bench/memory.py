"""Peak memory of one run: the allocator's on a GPU, the resident set's on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["peak_mib", "reset_peak"]

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak(device: torch.device) -> bool:
    """Start counting anew; tell whether this machine can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR.write_text("5")  # sets the resident set's high-water mark back (man 5 proc)
    except OSError:
        return False
    return True


def peak_mib(device: torch.device) -> float:
    """Read the peak since the last reset, MiB: of the whole process on the CPU, weights of all models included."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10
