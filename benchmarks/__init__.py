"""Benchmark scripts, run as ``python -m benchmarks.gpu.suite`` from the repository root, without installing anything.

Importing this package makes the checkout importable, here and in child processes: it puts the repository root and the
helpers of the tests on the import path, and restores the links `stree/kernels` and `stree/models` if a copy of the
repository has lost them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def prepare() -> None:
    """Set the import path and restore the links.

    Raises:
        RuntimeError: a file is in the place of a link, as in a clone without symbolic links.
    """
    for name in ("kernels", "models"):
        link = ROOT / "stree" / name
        if not link.exists() and not link.is_symlink():
            link.symlink_to(Path("..") / name, target_is_directory=True)
        if not link.is_dir():
            raise RuntimeError(f"{link} must be a link to ../{name}, got a file; run: ln -sfn ../{name} stree/{name}")
    folders = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    sys.path += [folder for folder in folders if folder not in sys.path]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *(folder for folder in folders if folder not in paths)])


prepare()
