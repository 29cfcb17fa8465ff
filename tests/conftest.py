"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ROOT
from benchmarks.gpu.first_run import kernel_tests

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined, so before any import

os.environ.setdefault("STREE_DEBUG", "memory")  # every step checks that its parts share no memory, and poisons it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network

torch.set_num_threads(1)  # tests are many and small: more threads make them slower


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `benchmarks.ahead_of_time.table --tests`, and that of the sanitizer."""
    parser.addoption("--record-launches", metavar="FOLDER", help="write every distinct build of a kernel to FOLDER")
    parser.addoption("--sanitize", action="store_true", help="check addresses and races of interpreted kernels: slow")


def pytest_collection_finish() -> None:
    """Leave what is loaded out of all further garbage collections: a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let what is loaded be freed."""
    gc.unfreeze()


def pytest_runtest_teardown() -> None:
    """Undo a test's number of threads: threads that begin later take over the last one that any thread has set."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of kernels, which put their tensors on a GPU where there is one."""
    files = {ROOT / file for file in kernel_tests(is_small=False)}
    for item in items:
        if item.path in files:
            item.add_marker(pytest.mark.gpu)


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


@pytest.fixture(scope="session", autouse=True)
def _orders_and_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run programs in reversed or shuffled order, poison memory that our code allocates, and cut TF32 operands."""
    with ExitStack() as stack:
        if importlib.util.find_spec("triton") and not torch.cuda.is_available():
            from helpers.sanitizer import cached_lookups, poisoned_memory, program_order, truncated_tf32

            stack.enter_context(program_order("shuffled" if request.config.getoption("sanitize") else "reversed"))
            stack.enter_context(cached_lookups())
            stack.enter_context(poisoned_memory())
            stack.enter_context(truncated_tf32())
        yield


@pytest.fixture(autouse=True)
def _sanitized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in whose launches a race or a wrong address is found."""
    if not request.config.getoption("sanitize") or request.path.name == "test_sanitizer.py":
        yield
        return
    from helpers.sanitizer import checked_launches

    with checked_launches() as findings:
        yield
    assert not findings, findings


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start Ray, once for all tests of a process."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'stree[ray]'")
    from helpers.http_served import KEY

    environment = {"env_vars": {"STREE_TEST_KEY": KEY, "OMP_NUM_THREADS": "1"}}
    often = {"metrics_report_interval_ms": 1000}
    ray.init(
        address="local", num_cpus=6, include_dashboard=False, runtime_env=environment, _system_config=often,
        log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


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
