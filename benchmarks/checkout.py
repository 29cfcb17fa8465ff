"""Make this checkout importable, here and in child processes, on a machine where nothing is installed.

Scripts import it before anything of `stree`.  A copy of the repository may have lost the links `stree/kernels` and
`stree/models`; they are made again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def prepare() -> None:
    """Put the repository root on the import path and restore its two links.

    Raises:
        RuntimeError: a file stands where a link should be, as in a clone without symbolic links.
    """
    for name in ("kernels", "models"):
        link = ROOT / "stree" / name
        if not link.exists() and not link.is_symlink():
            link.symlink_to(Path("..") / name, target_is_directory=True)
        if not link.is_dir():
            raise RuntimeError(f"{link} must be a link to ../{name}, got a file; run: ln -sfn ../{name} stree/{name}")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *paths]))
    if str(ROOT) not in sys.path:
        sys.path.insert(1, str(ROOT))


prepare()
