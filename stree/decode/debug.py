"""Checks after every step under STREE_DEBUG=1 or memory: its parts share no memory; what is over is poisoned.

A step has four kinds of tensors, and each is written by one owner: the texts by ``emit`` (and by the decode loop
between steps), the draft by the drafter, the logits by the target, the acceptance by the verifier.  A view of what
another owner writes later is an error, and so is reading a draft, logits or an acceptance after the step: poisoned
memory turns such a read into an error or a wrong text, which tests see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from stree.decode.step_result import LaunchedStep

__all__ = ["check_and_poison", "checks_memory"]


def checks_memory() -> bool:
    """Whether steps are checked: STREE_DEBUG is 1, which also checks values, or memory, which captured steps allow."""
    return os.environ.get("STREE_DEBUG") in ("1", "memory")


def check_and_poison(step: LaunchedStep, *texts: Any) -> None:
    """Check that a step's parts share no memory with each other and the texts, and overwrite those that are over.

    Raises:
        AssertionError: two of them do; both are named.
    """
    draft, logits = step.draft, (step.logits, step.path_logits, step.raw_path_logits)
    _check_owners(texts=texts, draft=draft, logits=logits, acceptance=step.acceptance, report=step.report)
    probs = None if draft.probs is None else draft.probs.probs
    _poison(draft.tree.tokens, draft.values, probs, logits, step.acceptance, step.report)


def _check_owners(**owners: Any) -> None:
    """Check that no two owners' tensors share memory.

    Args:
        owners: by name, tensors, or tuples and dataclasses of them.

    Raises:
        AssertionError: two of them do; both are named.
    """
    found: dict[int, str] = {}
    for name, owned in owners.items():
        for tensor in _tensors(owned):
            if tensor.numel():
                other = found.setdefault(tensor.untyped_storage().data_ptr(), name)
                assert other == name, f"{name} and {other} share memory: [{tensor.dtype}, {[*tensor.shape]}]"


def _poison(*owned: Any) -> None:
    """Overwrite tensors, or tuples and dataclasses of them: NaN in floats, the least number in integers."""
    for tensor in _tensors(owned):
        if tensor.dtype != torch.bool and 0 not in tensor.stride():
            tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def _tensors(owned: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples and dataclasses."""
    if isinstance(owned, Tensor):
        yield owned
    elif isinstance(owned, tuple):
        for part in owned:
            yield from _tensors(part)
    elif is_dataclass(owned) and not isinstance(owned, type):
        for part in fields(owned):
            yield from _tensors(getattr(owned, part.name))
