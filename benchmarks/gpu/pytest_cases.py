"""A plugin of pytest for `benchmarks.gpu.supervise`: every test is a case, with a record that is written at once.

Run: python -m pytest -p benchmarks.gpu.pytest_cases --records FILE [--share I N] FILE ...

After each test the device is synchronised.  If that fails, the CUDA context is lost: the process ends, and the
supervisor starts another behind that test.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.supervise import Progress
from stree.bench.records import append

NUM_CHARACTERS = 2000  # of a failure that a record keeps


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a supervised command."""
    group = parser.getgroup("gpu cases")
    group.addoption("--records", type=Path, required=True, help="file that a record of each test is appended to")
    group.addoption("--share", type=int, nargs=2, default=(0, 1), help="run share I of N of the tests")
    group.addoption("--progress", type=Path)
    group.addoption("--first", type=int, default=0)
    group.addoption("--minutes", type=float, default=9.0)


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin's state."""
    config.pluginmanager.register(Cases(config), "gpu-cases")


class Cases:
    """The tests of one process as numbered cases.

    Args:
        config: with the options.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.records: Path = config.getoption("--records")
        self.progress = Progress(config.getoption("--progress"))
        self.first: int = config.getoption("--first")
        self.share, self.count = config.getoption("--share")
        self.deadline = time.monotonic() + 60 * config.getoption("--minutes")
        self.numbers: dict[str, int] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep this share: neighbours stay together, since they launch the same kernels."""
        ends = [len(items) * place // self.count for place in (self.share, self.share + 1)]
        items[:] = items[slice(*ends)]
        self.numbers = {item.nodeid: number for number, item in enumerate(items)}
        del items[: self.first]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record that a test begins; afterwards end the process if the device cannot be used any more."""
        if time.monotonic() > self.deadline:
            self.progress.end(is_over=True)
            os._exit(0)
        self.progress.begin(self.numbers[item.nodeid], item.nodeid)
        result = yield
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception as problem:
                print(f"the CUDA context is lost: {problem}", flush=True)
                os._exit(1)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append a record of each test, and of each failure outside its call."""
        if report.when == "call" or report.outcome != "passed":
            failure = {"problem": report.longreprtext[-NUM_CHARACTERS:]} if report.failed else {}
            record = {"bench": "test", "test": report.nodeid, "outcome": report.outcome, **failure}
            append(self.records, [record | {"seconds": round(report.duration, 3)}])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Append a record of a file that cannot be imported."""
        if report.failed and self.share == self.first == 0:
            problem = report.longreprtext[-NUM_CHARACTERS:]
            append(self.records, [{"bench": "test", "test": report.nodeid, "outcome": "failed", "problem": problem}])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Record that all tests were run, if they were."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.progress.end(is_over=False)
