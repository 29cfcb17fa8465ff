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

from benchmarks.ahead_of_time.faults import faults

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
FAULTY = """
import triton, triton.language as tl
@triton.jit
def product_kernel(x_ptr, y_ptr, stride, steps, ROUNDED: tl.constexpr):
    row, total = tl.arange(0, 64), tl.zeros((64, 64), tl.float32)
    for step in range(steps):
        x = tl.load(x_ptr + row[:, None] * stride + step * 64 + row[None, :]).to(tl.float32)
        y = x if ROUNDED else x * 1.1
        total += tl.dot(x, y, input_precision="tf32")
    tl.store(y_ptr + row[:, None] * 64 + row[None, :], total)
"""
FIND = """
import json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.ahead_of_time import table
def problem(rounded, aligned, options):
    signature = {"x_ptr": "*bf16", "y_ptr": "*fp32", "stride": "i32", "steps": "i32", "ROUNDED": "constexpr"}
    names = ["x_ptr", "y_ptr", *["stride"] * aligned]
    build = table.Build("faulty:product_kernel", signature, {"ROUNDED": rounded}, names, {"num_warps": 4, **options})
    return table.problem_of(table.compile_build(build), may_spill=False)
stated = {"enable_fp_fusion": True}
print(json.dumps([problem(True, True, stated), problem(False, True, stated), problem(True, False, stated),
                  problem(True, True, {})]))
"""
CODE = """
%node = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32, #blocked>
%other = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32, #blocked1>
%base = tt.splat %x_ptr : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>, #blocked>
%base_1 = tt.splat %x_ptr : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>, #blocked1>
%from = tt.addptr %base, %node : tensor<64x!tt.ptr<f32>, #blocked>, tensor<64xi32, #blocked>
%to = tt.addptr %base_1, %other : tensor<64x!tt.ptr<f32>, #blocked1>, tensor<64xi32, #blocked1>
%low = arith.cmpi slt, %node, %bound : tensor<64xi32, #blocked>
%high = arith.cmpi sge, %other, %bound : tensor<64xi32, #blocked1>
%x = tt.load %from, %low, %zero : tensor<64x!tt.ptr<f32>, #blocked>
BETWEEN
tt.store STORED
"""
COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from benchmarks.ahead_of_time import table
def problems(name, size):
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "SIZE": "constexpr"}
    build = table.Build(f"toy:{name}_kernel", signature, {"SIZE": size}, [], {"num_warps": 1, "enable_fp_fusion": True})
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
def test_what_only_the_machine_code_shows_is_named(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    sound, unrounded, narrow, silent = json.loads(run("-c", FIND, str(tmp_path)))
    assert sound is None
    assert re.search(r"multiplies %\w+ in TF32, which nothing has rounded", unrounded)
    assert re.fullmatch(r"loads 2 bytes at a time in a loop of matrix products: \d+ loads", narrow)
    assert silent == "leaves the fusion of products and sums to Triton: no enable_fp_fusion"


def test_a_store_in_another_layout_than_the_load_needs_a_barrier_or_another_mask() -> None:
    moved = "%to, %x_1 : tensor<64x!tt.ptr<f32>, #blocked1>"

    def found(between: str, stored: str, ptx: str = "ld.global.b32") -> list[str]:
        code = CODE.replace("BETWEEN", between).replace("STORED", stored)
        return list(faults({"ttgir": code, "ptx": ptx}, {"enable_fp_fusion": False}))

    assert [fault[:15] for fault in found("", moved)] == ["stores as tenso"]
    assert not found("gpu.barrier", moved)
    assert not found("", "%from, %x : tensor<64x!tt.ptr<f32>, #blocked>")
    assert not found("", moved.replace("%x_1", "%x_1, %high"))
    assert not found("", moved.replace("%to", "%elsewhere"))
    assert found("gpu.barrier", moved, "ld.global.nc.b32") == ["loads through the read-only cache: ld.global.nc"]


def records_of(name: str) -> list[dict[str, Any]]:
    """Read the committed records of builds, behind a header with the hashes of the files that they were made from."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines()]


def test_real_runs_launch_every_kernel_in_the_variants_of_their_layers() -> None:
    for kernel, switches in (("attention_kernel", ("KNOWN", "DIRECT", "WINDOW", "SOFTCAP", "SHARES")),
                             ("ssd_kernel", ("KNOWN", "COMMIT")), ("gated_delta_kernel", ("KNOWN",))):  # fmt: skip
        found = [record["constants"] for record in records_of("runs")[1:] if record["kernel"] == kernel]
        for switch in switches:
            assert {constants[switch] for constants in found} == {False, True}, switch


def test_committed_records_are_of_the_kernels_as_they_are() -> None:
    # In a process of its own, as the module switches Triton's interpreter off.
    sources = json.loads(
        run("-c", "import json; from benchmarks.ahead_of_time import table; print(json.dumps(table.sources()))")
    )
    for name in ("runs", "tests"):
        header, *records = records_of(name)
        changed = {path for path, _ in header["sources"].items() ^ sources.items()}
        assert not changed, f"{name} made before changes of {changed}; renew it: see CONTRIBUTING.md"
        assert {each["kernel"] for each in records} == KERNELS
        assert all({"3.6.0", "3.9.0"} <= each.keys() for each in records)
