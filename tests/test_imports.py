"""Modules that are imported on first use are imported whole, whichever thread is first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A second import of a slow module starts while the first one runs.
SCRIPT = """
import sys, threading, time
from stree.kernels import dispatch

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "slow_operations":
            from importlib.machinery import ModuleSpec
            return ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        started.set()
        time.sleep(0.3)
        module.operation = lambda: "whole"

started = threading.Event()
sys.meta_path.insert(0, Slow())
dispatch.REFERENCE["operation"] = "slow_operations"
import torch
found = []
def call():
    found.append(dispatch.choose("operation", "reference", torch.zeros(1))())
first = threading.Thread(target=call)
first.start()
started.wait()
call()
first.join()
assert found == ["whole"] * 2, found
"""


def test_an_operation_is_called_once_its_module_is_whole() -> None:
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, check=True, capture_output=True, text=True)
