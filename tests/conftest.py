"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined, so before any import

torch.set_num_threads(1)  # tests are many and small: more threads make them slower


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `benchmarks.ahead_of_time.table --tests`."""
    parser.addoption("--record-launches", metavar="FOLDER", help="write every distinct build of a kernel to FOLDER")


@pytest.fixture(scope="session", autouse=True)
def _recorded_launches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write the builds of all launches to a file of this process."""
    folder = request.config.getoption("record_launches")
    if folder is None:
        yield
        return
    from benchmarks.ahead_of_time.launches import recorded

    lines: set[str] = set()
    with recorded(lambda build: lines.add(json.dumps(asdict(build)) + "\n"), is_launched=True):
        yield
    ours = "".join(line for line in sorted(lines) if '{"kernel": "stree.kernels.' in line)
    (Path(folder) / f"{os.getpid()}.jsonl").write_text(ours, encoding="utf-8")


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
