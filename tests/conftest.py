"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined, so before any import

torch.set_num_threads(1)  # tests are many and small: more threads make them slower


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and torch.empty_like return with NaN, so that an output left unwritten is seen."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)

        def poisoned(*args: Any, real: Any = real, **kwargs: Any) -> Tensor:
            tensor: Tensor = real(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, poisoned)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny target with its tokenizer."""
    from helpers.tiny_pairs import save_tiny

    return save_tiny(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: str) -> Any:
    """Load it."""
    import stree

    return stree.TreeLM.from_pretrained(target_folder, "cpu")


@pytest.fixture(scope="module")
def tokenizer(target_folder: str) -> Any:
    """Load its tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_folder)
