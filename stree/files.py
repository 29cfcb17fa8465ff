"""Files that are written whole or not at all, and folders that one process writes into."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = ["alone_in", "check_folder", "replacing"]


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made, because a file stands in its place or above it.

    Raises:
        ValueError: the message names the file.
    """
    known = next(path for path in (folder, *folder.parents) if path.exists())
    if not known.is_dir():
        raise ValueError(f"a folder is needed at {folder}, but {known} is a file")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder, and keep others who ask for it out until the block ends, or the process, however it does.

    Raises:
        ValueError: another one is in there, or a file in its place or above it.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with suppress(ImportError, OSError):  # a system or file system without such locks
            import fcntl

            number = os.open(folder, os.O_RDONLY)
            held.callback(os.close, number)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another run writes into {folder}; wait for its end, or choose another --out"
                ) from error
        yield


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
