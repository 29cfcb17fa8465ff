"""Files that are written whole or not at all, and folders that one process writes into."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = ["alone_in", "check_file", "check_folder", "exchange", "failures_named", "replacing"]


def check_folder(folder: Path) -> None:
    """Check that a folder can be made and written: no file is in its place or above it, nor a read-only folder.

    Raises:
        ValueError: the message names the file.
    """
    known = next(path for path in (folder, *folder.parents) if path.exists())
    if not known.is_dir():
        raise ValueError(f"a folder is needed at {folder}, but {known} is a file")
    if not os.access(known, os.W_OK):
        raise ValueError(f"cannot write {folder}: {'it' if known == folder else known} is read-only")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a folder and hold a lock on it until the block or the process ends.

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
                if os.fstat(number).st_ino != folder.stat().st_ino:  # another run has just exchanged the folder
                    raise BlockingIOError
            except BlockingIOError as error:
                raise ValueError(
                    f"another run writes into {folder}; wait for its end, or choose another --out"
                ) from error
        yield


def exchange(one: Path, other: Path) -> None:
    """Exchange the names of two files or folders in one step, so that neither name is missing at any moment.

    Raises:
        OSError: the system (renameat2 of Linux) or the file system cannot; nothing has changed.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchanging = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call is None or call(here, os.fsencode(one), here, os.fsencode(other), exchanging):
        number = errno.ENOSYS if call is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that replaces the file when the block ends without an error.

    Several writers of one file may run at once; the file is always whole, and the last writer's stays.  Its permissions
    are those of any new file here, also where its writer (safetensors) sets stricter ones.

    Raises:
        ValueError: the path is no regular file, or it cannot be written, as on a full disk; it is as it was.
    """
    path = check_file(Path(path))
    beside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    with failures_named(path):
        try:
            beside.touch()
            mode = beside.stat().st_mode
            yield beside
            if beside.stat().st_mode != mode:
                beside.chmod(mode)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def check_file(path: Path) -> Path:
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        ValueError: its folder does not exist, or there is something else than a regular file.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ValueError(f"cannot write {path}: it is {kind}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write {path}: its folder does not exist")
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {path}: its folder is read-only")
    return path


@contextmanager
def failures_named(path: Path) -> Iterator[None]:
    """Name the file, and the cause in one line, where the block fails to write it.

    Raises:
        ValueError: it does.
    """
    try:
        yield
    except Exception as error:
        # safetensors and torch have errors of their own for a system call that failed.
        is_writing = any(words in str(error) for words in ("I/O error", "os error", "failed writing", "enforce fail"))
        if not (isinstance(error, OSError) or is_writing):
            raise
        first: BaseException = error
        while not isinstance(first, OSError) and first.__context__ is not None:
            first = first.__context__
        cause = getattr(first, "strerror", None) or str(error).splitlines()[0]
        raise ValueError(f"cannot write {path}: {cause}") from error
