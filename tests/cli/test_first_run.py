"""The first command of a fresh installation: what is compiled, loaded and set before text is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENDING = "print(json.dumps(found))"
# Counts what numba compiles before the first character of text is printed, and afterwards.
COMPILING = f"""
import io, json, sys, time
from numba.core import event
from stree.cli import main

class Compilations(event.Listener):
    count, seconds, depth = 0, 0.0, 0  # of one inside another the outer one's seconds
    def on_start(self, event):
        self.count, self.depth = self.count + 1, self.depth + 1
        self.began = self.began if self.depth > 1 else time.perf_counter()
    def on_end(self, event):
        self.depth -= 1
        self.seconds += 0 if self.depth else time.perf_counter() - self.began

class Text(io.StringIO):
    first = None
    def write(self, text):
        if self.first is None:
            self.first = compilations.count
        return super().write(text)

compilations = Compilations()
event.register("numba:compile", compilations)
found, stdout = {{}}, sys.stdout
for name, options in json.loads(sys.argv[1]).items():
    compilations.count, compilations.seconds, text = 0, 0.0, Text()
    began, sys.stdout = time.perf_counter(), text
    status = main(["generate", "1 2 3 1 2 3 1 2", "--max-new-tokens", "12", *options])
    sys.stdout = stdout
    found[name] = {{
        "status": status, "before": text.first, "whole": compilations.count, "text": text.getvalue(),
        "compile_s": compilations.seconds, "wall_s": time.perf_counter() - began,
    }}
{ENDING}
"""


def run(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run a program of Python in a process of its own; return what it prints in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_nothing_is_compiled_within_the_timed_text(tmp_path: Path) -> None:
    options = ["--drafter", "fused"]  # a model, retrieval and their union
    cases = {"greedy": options, "sampled": [*options, "--temperature", "1", "--json"]}
    found = run(COMPILING, json.dumps(cases), NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    greedy, sampled = found["greedy"], found["sampled"]
    assert [case["status"] for case in found.values()] == [0, 0]
    assert greedy["before"] == greedy["whole"] > 0  # text is written while it is generated
    report = json.loads(sampled["text"].splitlines()[-1])
    assert sampled["whole"] > 0  # functions that greedy text does not call
    assert report["warm_up_s"] >= sampled["compile_s"] > 0
    assert report["total_s"] <= sampled["wall_s"] - report["warm_up_s"]
    assert report["tokens_per_s"] == pytest.approx(report["num_new_tokens"] / report["total_s"])
    assert list(tmp_path.rglob("*.nbc"))
    again = run(COMPILING, json.dumps(cases), NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    assert [case["whole"] for case in again.values()] == [0, 0]
    assert again["greedy"]["text"] == greedy["text"]
