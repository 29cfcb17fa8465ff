"""A whole step's launches are counted where they happen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("counts are made under Triton's interpreter", allow_module_level=True)

from benchmarks.ahead_of_time import step_counts


def test_parts_of_a_step_launch_what_they_should_and_no_more() -> None:
    record = step_counts.count(6, 2, 0.0)
    parts = record["parts"]
    assert record["value"] == sum(parts.values()) and set(step_counts.PARTS) <= set(parts)
    assert record["forwards"]["draft forwards"] > record["forwards"]["target forward"] / 4 > 0
    assert parts["emit"] == 2 and record["by_name"]["emit: emit_kernel"] == 1
    assert record["by_name"]["observe: columns_kernel"] == 1 and parts["observe"] <= 6
    assert record["by_name"]["observe: nodes_kernel"] == record["by_name"]["observe: level_kernel"] == 1
    assert record["by_name"]["observe: remember_kernel"] == 1
    assert record["by_name"]["accept: walk_kernel"] == 1 and parts["accept"] == 4
    assert record["by_name"]["commit: rows_kernel"] == 1 and parts["commit"] == 3
    assert parts["verify"] <= 5 and parts["loop"] <= 5  # of which one copies the pending tokens


def test_distributions_take_two_launches_and_what_a_step_teaches_one_behind_another() -> None:
    record = step_counts.count(6, 2, 0.8)
    assert record["by_name"]["observe: learn_kernel"] == record["by_name"]["observe: cat"] == 1
    assert "observe: remember_kernel" not in record["by_name"] and record["parts"]["observe"] <= 6
    assert (
        record["by_name"]["accept: masses_kernel"] == record["by_name"]["accept: probs_kernel"] == 1
        and record["parts"]["accept"] <= 18
    )
    assert not {"div", "softmax", "_softmax", "linalg_vector_norm"} & {
        name.split(": ")[1] for name in record["by_name"]
    }


def test_more_draft_calls_launch_more_and_more_nodes_do_not() -> None:
    small, deep, wide = (step_counts.count(*size, 0.0)["parts"] for size in ((6, 2), (6, 3), (9, 2)))
    assert deep["growth"] > small["growth"] == wide["growth"]
    assert {part: deep[part] for part in deep if part != "growth"} == {
        part: small[part] for part in small if part != "growth"
    }
