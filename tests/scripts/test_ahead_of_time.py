"""The Triton kernels compile without a GPU, and the committed records are of the kernels as they are.

Run: python -m pytest tests/scripts/test_ahead_of_time.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "aot"
KERNELS = {
    name
    for path in (ROOT / "kernels").rglob("*.py")
    for name in re.findall(r"^def ([a-z]\w+_kernel)\(", path.read_text("utf-8"), re.M)
}
pytest.importorskip("triton")

TOY = """
import triton, triton.language as tl
@triton.jit
def good_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, SIZE), tl.load(x_ptr + tl.arange(0, SIZE)) + 1)
@triton.jit
def unknown_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, SIZE), tl.no_such_function(x_ptr))
"""
COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.ahead_of_time import table
def problems(name, size):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "SIZE": "constexpr"}
    build = table.Build(f"toy:{name}_kernel", signature, {"SIZE": size}, [], {"num_warps": 1})
    found = table.compile_build(build)
    return [table.problem_of(found, may_spill=may_spill) for may_spill in (False, True)]
print(json.dumps([problems("good", 1024), problems("good", 16384), problems("unknown", 1024)]))
"""


def run(*arguments: str) -> str:
    """Run Python in a process of its own: this one may have Triton in the interpreter's mode."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_build_that_fails_or_spills_is_named(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    good, spilling, unknown = json.loads(run("-c", COMPILE, str(tmp_path)))
    assert good == [None, None]
    assert re.fullmatch(r"spills \d+ bytes a thread", spilling[0]) and spilling[1] is None
    assert "no_such_function" in unknown[0] and "no_such_function" in unknown[1]


@pytest.mark.slow
def test_real_runs_launch_every_kernel_in_the_variants_of_their_layers() -> None:
    listing = "from benchmarks.ahead_of_time.runs import run_builds; import json; "
    listing += "print(json.dumps({b.kind: [b.name, b.constants] for _, b in run_builds()}.copy()))"
    found: list[tuple[str, dict[str, Any]]] = list(json.loads(run("-c", listing)).values())
    assert {name for name, _ in found} == KERNELS
    for kernel, switches in (("attention_kernel", ("KNOWN", "DIRECT", "WINDOW", "SOFTCAP", "SHARES")),
                             ("ssd_kernel", ("KNOWN", "COMMIT")), ("gated_delta_kernel", ("KNOWN",))):  # fmt: skip
        for switch in switches:
            assert {constants[switch] for name, constants in found if name == kernel} == {False, True}, switch


@pytest.mark.parametrize("name", ["runs", "tests"])
def test_committed_records_are_of_the_kernels_as_they_are(name: str) -> None:
    # In a process of its own, as the module switches Triton's interpreter off.
    sources = json.loads(
        run("-c", "import json; from benchmarks.ahead_of_time import table; print(json.dumps(table.sources()))")
    )
    header, *records = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines()]
    changed = {path for path, _ in header["sources"].items() ^ sources.items()}
    assert not changed, f"made before changes of {changed}; renew it: see CONTRIBUTING.md"
    assert {each["kernel"] for each in records} == KERNELS
    assert all({"3.6.0", "3.9.0"} <= each.keys() for each in records)
