"""``stree --version``, ``python -m stree`` and ``stree.__version__``.

Run: python -m pytest tests/cli/test_version.py
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import stree


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "stree", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == f"stree {stree.__version__}\n" == f"stree {version('stree')}\n"


@pytest.mark.parametrize(
    "thread", ["", "import threading, time; threading.Thread(target=time.sleep, args=(0.1,)).start();"]
)
def test_a_command_ends_with_its_status_after_all_output_and_what_runs_at_exit(thread: str) -> None:
    program = "import atexit, stree.cli.__main__ as command; command.main = lambda: print('text') or 3;"
    program += f"{thread} atexit.register(print, 'later'); command.run()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "text\nlater\n", "")


def test_the_first_process_of_a_container_ends_at_sigterm_before_a_model_is_loaded() -> None:
    program = "import os, signal, stree.cli as cli, stree.cli.__main__ as command; os.getpid = lambda: 1;"
    program += "cli.import_own = lambda _: signal.raise_signal(signal.SIGTERM); command.run()"
    done = subprocess.run([sys.executable, "-c", program, "info"], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
