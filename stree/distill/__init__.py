"""Making a drafter for a target: ``distill_drafter``, and ``stree distill`` on the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stree.distill.run import distill_drafter
    from stree.distill.settings import Settings

__all__ = ["Settings", "distill_drafter"]

# Looked up on first use, so that the command line starts without torch.
_HOMES = {"Settings": "stree.distill.settings", "distill_drafter": "stree.distill.run"}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'stree.distill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
