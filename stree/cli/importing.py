"""Importing large libraries without garbage collection, and modules of the user."""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["import_models", "import_own", "own_digests", "without_collection"]


@contextmanager
def without_collection() -> Iterator[None]:
    """Import in the block what a command needs: collections take a fifth of the time of importing transformers.

    What was imported stays until the process ends, so collections do not look at it before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
            atexit.register(gc.unfreeze)  # extension modules report what the last collection leaves


def import_models(*, compiles: bool = False) -> None:
    """Import what every command that generates needs of transformers and of this package; inductor if it compiles."""
    with without_collection():
        from transformers import AutoTokenizer  # noqa: F401

        import stree.warming

        if compiles:
            import torch._inductor.compile_fx  # noqa: F401

            import stree.models.compiled_files  # noqa: F401


def import_own(names: str | None) -> None:
    """Import what ``--import`` names, modules on the path or .py files, with commas between them, once each.

    Raises:
        ValueError: no such file, or what an import has raised.
    """
    for name in filter(None, (names or "").split(",")):
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                importlib.import_module(name)
        except Exception as error:  # a module of the user raises anything
            raise ValueError(f"--import {name}: {type(error).__name__}: {error}") from error


def own_digests(names: str | None) -> list[str]:
    """Return a digest of the file of each module that ``import_own`` has imported."""
    own = [name for name in (names or "").split(",") if name]
    files = [name if name.endswith(".py") else getattr(sys.modules[name], "__file__", None) for name in own]
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in files if file is not None]


def _import_file(path: Path) -> None:
    """Run a file as the module that is named by its path; it finds modules beside it, as a script does."""
    if str(path) in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
