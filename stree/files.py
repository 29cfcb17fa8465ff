"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a place of its own beside a file, which takes the file's place once the block has ended without an error.

    Several writers of one file may run at once; each leaves it whole, and the last one's stays.  Whoever may read a new
    file here may read it, also where its writer (safetensors) keeps what it writes to itself.
    """
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        beside.touch()
        mode = beside.stat().st_mode
        yield beside
        if beside.stat().st_mode != mode:
            beside.chmod(mode)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
