"""The count of what a generation passes through sees this package's functions and no others."""

from __future__ import annotations

from benchmarks.studies.call_depth import count


def test_a_generation_is_counted_from_generate_down_to_a_kernel() -> None:
    called, deepest = count(max_new_tokens=4)
    files = {function.partition(":")[0] for function in called}
    assert {"stree/decode/step.py", "models/tree_lm.py", "kernels/mamba2/cpu.py"} <= files
    assert all(file.split("/")[0] in ("stree", "kernels", "models") for file in files)
    assert deepest[0].endswith(" generate") and len(deepest) <= len(called)
    assert set(deepest) <= called
