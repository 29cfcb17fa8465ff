"""Launches are counted where they happen; fused layers launch as few kernels as they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("counts are made under Triton's interpreter", allow_module_level=True)

from benchmarks.ahead_of_time import kernel_counts
from benchmarks.ahead_of_time.launch_counter import launches

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kernel-counts" / "results.jsonl"
aten = torch.ops.aten


def test_views_and_allocations_launch_nothing() -> None:
    for operator in (aten.mm.default, aten.add_.Tensor, aten._to_copy.default, aten.arange.default,
                     aten.index_put_.default, aten.copy_.default):  # fmt: skip
        assert launches(operator), operator
    for operator in (aten.view.default, aten.split_with_sizes.default, aten.transpose.int, aten._unsafe_view.default,
                     aten.empty_like.default, aten.promote_types.default):  # fmt: skip
        assert not launches(operator), operator


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_layer_of_mamba2_launches_six_kernels_or_four() -> None:
    before, after, mixers = (
        {r["params"]["layer"]: r for r in kernel_counts.count("mamba2", 5, provider)}
        for provider in kernel_counts.PROVIDERS
    )
    layer = after["Mamba2Mixer"]
    assert layer["params"]["layers"] == 2 and layer["dtype"] == "bfloat16"
    # Two products, and the cast with which the stream of the first layer becomes float32.
    assert layer["by_name"] == {
        "mm": 2.0, "norm_add_kernel": 1.0, "conv_kernel": 1.0, "ssd_kernel": 1.0, "gated_norm_kernel": 1.0,
        "_to_copy": 0.5,
    }  # fmt: skip
    assert layer["parts"] == {"norm": 1.0, "mixer": 5.0, "layer": 0.5} and layer["value"] == 6.5
    assert before["Mamba2Mixer"]["parts"] == {"norm": 8.0, "mixer": 5.0, "layer": 2.0}
    assert "norm_add_kernel" not in before["Mamba2Mixer"]["by_name"]
    assert after["outside"]["by_name"]["tree_kernel"] == after["outside"]["by_name"]["path_kernel"] == 1
    assert after["outside"]["value"] <= 9 and after["commit"]["value"] == 2
    assert mixers["Mamba2Mixer"]["by_name"] == {"mm": 2.0, "norm_add_kernel": 1.0, "ssd_kernel": 1.0, "_to_copy": 0.5}
    assert mixers["outside"]["value"] == after["outside"]["value"]
    assert mixers["commit"]["by_name"] == {
        "defer_kernel": 1,
        "rows_kernel": 1,
        "repeat": 2,
        "path_kernel": 1,
        "conv_kernel": 1,
    }


def test_the_committed_counts_hold_every_family_before_and_after() -> None:
    records = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {(r["params"]["family"], r["provider"]) for r in records} == {
        (family, provider) for family in kernel_counts.FAMILIES for provider in kernel_counts.PROVIDERS
    }
    counts = {(str(r["params"]), r["provider"]): r["value"] for r in records if r["params"]["layer"] != "commit"}
    for (place, provider), value in counts.items():
        assert provider != "before" or counts[place, "mixers"] <= counts[place, "after"] < value
