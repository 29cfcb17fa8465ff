"""``stree bench kernels``: run the kernel cases of the repository's GPU suite and print its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["run_kernels"]

ROOT = Path(__file__).resolve().parent.parent.parent


def run_kernels(*, smoke: bool, out: Path) -> int:
    """Run the suite in a process of its own, which compares every kernel with the reference before timing it.

    Args:
        smoke: tiny sizes, under Triton's interpreter where there is no GPU.
        out: folder of the records.

    Returns:
        The suite's exit status.

    Raises:
        RuntimeError: stree was not imported from a checkout, or there is no GPU and ``smoke`` is False.
    """
    if not (ROOT / "benchmarks" / "gpu" / "suite.py").is_file():
        raise RuntimeError(
            "kernel benches are run from a checkout of the repository: benchmarks/gpu/suite.py is missing"
        )
    if not (smoke or torch.cuda.is_available()):
        raise RuntimeError("kernel benches need a CUDA device; --smoke runs tiny sizes under Triton's interpreter")
    environment = {**os.environ, **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})}
    command = [sys.executable, "-m", "benchmarks.gpu.suite", "--parts", "kernels", "--out", str(out.resolve())]
    return subprocess.run(
        [*command, *(["--smoke"] if smoke else [])], cwd=ROOT, env=environment, check=False
    ).returncode
