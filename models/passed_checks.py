"""On-disk cache of the module classes whose adapters agreed with their own forwards: one empty file for each hash."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

import stree.kernels.ops
from stree.models.prefill_functions import serving_packages, version_of

__all__ = ["cache_folder", "code_digest", "digest_of", "has_passed", "record_passed"]

TRANSFORMERS = str(Path(transformers.__file__).parent)

OWN_FOLDERS = Path(__file__).parent, Path(stree.kernels.ops.__file__).parent

_passed: set[str] = set()


def digest_of(kind: type, device: torch.device, dtype: torch.dtype) -> str | None:
    """Hash all that a comparison of a module class depends on; None if its forward is not the one in its source.

    These are the class's source, adapters, kernels, the kind of device, the dtype of the weights, the releases of
    transformers, torch and triton, and which package serves each function of the class's own forward.
    """
    owner = next(one for one in kind.__mro__ if "forward" in vars(one))
    source, forward = _source(owner), vars(owner)["forward"]
    while _source(forward).startswith(TRANSFORMERS) and hasattr(forward, "__wrapped__"):  # its decorators
        forward = forward.__wrapped__
    if not source or _source(forward) != source or forward.__qualname__ != f"{owner.__qualname__}.forward":
        return None
    return code_digest((f"{kind.__module__}.{kind.__qualname__}", device.type, dtype), {kind, owner}, device)


def code_digest(key: object, kinds: Iterable[type], device: torch.device) -> str | None:
    """Hash a key and the code that runs modules on a device, this package's included; None without their source.

    Args:
        key: has a ``repr`` that names it.
        kinds: classes of the modules.
        device: chooses the packages that serve functions of theirs.
    """
    kinds = sorted(kinds, key=lambda kind: kind.__qualname__)
    versions = transformers.__version__, torch.__version__, version_of("triton")
    name = repr((key, versions, [serving_packages(kind, device) for kind in kinds]))
    with suppress(OSError):  # no source to read
        return hashlib.sha256(f"{name} {_hash(*map(_source, kinds))}".encode()).hexdigest()
    return None


def cache_folder() -> Path:
    """Return the folder of what is kept for other processes; one that cannot be made where there is no home."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.devnull if folder.startswith("~") else folder, "stree")


def has_passed(digest: str) -> bool:
    """Return whether a comparison has passed, in this process or another one."""
    return digest in _passed or os.path.exists(_folder() / digest)


def record_passed(digest: str) -> None:
    """Record that a comparison has passed."""
    _passed.add(digest)
    with suppress(OSError):  # without a home that can be written, each process compares once
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / digest).touch()


def _folder() -> Path:
    """Return the folder of the files."""
    return cache_folder() / "self_check"


def _source(code: Any) -> str:
    """Return the file of a class, or the one in which a function was written; "" if there is none."""
    if hasattr(code, "__code__"):
        return str(code.__code__.co_filename)
    with suppress(TypeError):
        return inspect.getsourcefile(code) or ""
    return ""


@functools.cache
def _hash(*files: str) -> str:
    """Hash the content of files, those of the models' and the kernels' code included."""
    own = (str(file) for folder in OWN_FOLDERS for file in folder.rglob("*.py"))
    parts = (Path(file).read_bytes() for file in sorted({*files, *own} - {""}))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
