"""The first command of a fresh installation: what is compiled, loaded and set before text is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stree.cli.threads import SET_BY_USER, CoreUse, FreeCores, cores_of_container, threads_for

ROOT = Path(__file__).resolve().parents[2]
# Counts what numba compiles before the first character of text is printed, and afterwards.
COMPILING = """
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
found, stdout = {}, sys.stdout
for name, options in json.loads(sys.argv[1]).items():
    compilations.count, compilations.seconds, text = 0, 0.0, Text()
    began, sys.stdout = time.perf_counter(), text
    status = main(["generate", "1 2 3 1 2 3 1 2", "--max-new-tokens", "12", *options])
    sys.stdout = stdout
    found[name] = {
        "status": status, "before": text.first, "whole": compilations.count, "text": text.getvalue(),
        "compile_s": compilations.seconds, "wall_s": time.perf_counter() - began,
    }
print(json.dumps(found))
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


SERVING = """
import json
from numba.core import event
import stree
from stree.inputs import ASSETS
from stree.warming import ALL_BATCHES, compile_steps

class Names(event.Listener):
    def on_start(self, event):
        names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

names, counts = [], []
event.register("numba:compile", Names())
lm = stree.TreeLM.from_pretrained(ASSETS / "target")
drafter = stree.drafters.load(ASSETS / "drafter", lm)
compile_steps(lm, drafter, budget="auto", batches=ALL_BATCHES)
num_before = len(names)
for temperature in (0, 1):
    with stree.Engine(lm, drafter, max_batch=3, before_step=lambda: counts.append(1)) as engine:
        samplings = [stree.Sampling(), stree.Sampling(temperature), stree.Sampling(temperature, top_p=0.9)]
        requests = [engine.submit([1, 2, 3, 1, 2], sampling=each, max_new_tokens=12) for each in samplings]
        steps = [request.result().stats["steps"] for request in requests]
print(json.dumps({"before": num_before, "later": names[num_before:], "calls": len(counts), "steps": steps}))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_requests_of_a_server_meet_compiled_code(tmp_path: Path) -> None:
    found = run(SERVING, NUMBA_CACHE_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    assert found["before"] > 0 and found["later"] == []
    assert found["calls"] > min(found["steps"]) > 0


LOADING = """
import contextlib, gc, io, json, sys
from stree.cli import main

with contextlib.redirect_stdout(io.StringIO()):
    with contextlib.suppress(SystemExit):
        main(["generate", "--help"])
    helps = [*sys.modules]
    status = main(["generate", "1 2 3", "--max-new-tokens", "4"])
import torch
found = {"helps": helps, "runs": [*sys.modules], "threads": torch.get_num_threads(), "collects": gc.isenabled()}
print(json.dumps(found | {"status": status}))
"""


@pytest.mark.slow
def test_a_command_loads_what_it_needs_and_leaves_the_users_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING], cwd=ROOT, capture_output=True, text=True, timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == 0
    assert not {"torch", "transformers", "numba", "numpy", "rich", "psutil"} & {*found["helps"]}
    families = [f"transformers.models.{name}.modeling_{name}" for name in ("minimax", "mamba", "qwen3_next")]
    assert not {"rich.console", "fastapi", "ray", "torch._inductor.compile_fx", *families} & {*found["runs"]}
    assert found["threads"] == 2, "whatever else runs on this machine"
    assert found["collects"]
    summary = [line.split()[:1] for line in done.stderr.splitlines() if line]
    assert summary == [["4"], ["seconds:"]], "no warning, at the end of the process neither"


@pytest.mark.parametrize(
    ("idle_s", "own_s", "threads"),
    [
        pytest.param(10, 10, 2, id="idle machine, one core imports"),
        pytest.param(0, 19.9, 2, id="both cores are ours"),
        pytest.param(8, 10, 2, id="some background work"),
        pytest.param(0, 10, 1, id="another process has a core"),
        pytest.param(0, 6, 1, id="others have both cores"),
        pytest.param(5, 10, 1, id="another process has half a core"),
        pytest.param(140, 10, 2, id="no more than torch's choice"),
    ],
)
def test_threads_are_as_many_as_cores_are_free(idle_s: float, own_s: float, threads: int) -> None:
    before, after = CoreUse(-100, 50, 3), CoreUse(-90, 50 + idle_s, 3 + own_s)
    assert threads_for(before, after, most=2) == threads


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("variable", [None, *SET_BY_USER])
def test_threads_follow_the_load_unless_the_user_chose(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = iter([CoreUse(-100, 0, 0), CoreUse(-99, 0, 0.7), CoreUse(-98, 0, 1.4), CoreUse(-97, 1, 2.4)])
    if variable is not None:
        monkeypatch.setenv(variable, "2")
    cores, found = FreeCores(lambda: next(uses)), []
    for _ in range(3):
        cores.adapt()
        found.append(torch.get_num_threads())
    assert found == ([1, 1, 2] if variable is None else [2, 2, 2])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("weights", "threads"), [([16 << 20, 8 << 20], 1), ([32 << 20, 32 << 20], 2)])
def test_small_models_have_one_thread_on_idle_cores(weights: list[int], threads: int) -> None:
    """24 MiB are the bundled target's; the same cores are free for both."""
    uses = iter([CoreUse(-9.0, 0.0, 0.0), CoreUse(-8.0, 2.0, 0.0)])
    cores = FreeCores(lambda: next(uses))
    cores.fit(torch.empty(size, dtype=torch.uint8, device="meta") for size in weights)
    cores.adapt()
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("two_threads")
def test_a_container_has_no_more_threads_than_its_cores(tmp_path: Path) -> None:
    uses = iter([CoreUse(-9.0, 0.0, 0.0), CoreUse(-8.0, 2.0, 0.0)])  # both cores are idle
    FreeCores(lambda: next(uses), limit=1.5).adapt()
    assert torch.get_num_threads() == 1
    limits = {"150000 100000": 1.5, "max 100000": float("inf"), "": float("inf")}
    for text, cores in limits.items():
        (tmp_path / "cpu.max").write_text(text)
        assert cores_of_container(tmp_path / "cpu.max") == cores
    assert cores_of_container(tmp_path / "nowhere") == float("inf")
