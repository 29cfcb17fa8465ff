"""The sanitizer of the kernel tests finds each fault in a toy kernel that has it, and none in one without.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_sanitizer.py
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are interpreted on the CPU only", allow_module_level=True)

import triton
import triton.language as tl
from helpers.sanitizer import checked_launches, poisoned_memory, program_order

SIZE = 4
PROGRAMS = 3


@triton.jit
def copy_kernel(x_ptr, y_ptr, behind, SIZE: tl.constexpr):
    """Copy a block to the place of one that is ``behind`` blocks further."""
    block = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + block + behind * SIZE, tl.load(x_ptr + block))


@triton.jit
def lead_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    """Store one number from every program."""
    tl.store(y_ptr + tl.arange(0, SIZE), tl.load(x_ptr + tl.program_id(0)))


def copied(behind: int, *, blocks: int = PROGRAMS, in_place: bool = False) -> torch.Tensor:
    x = torch.arange(float(blocks * SIZE))
    y = x if in_place else torch.empty(blocks * SIZE)
    copy_kernel[(PROGRAMS,)](x, y, behind, SIZE=SIZE)
    return y


def test_the_order_of_programs_is_changed() -> None:
    found = {}
    for order in ("forward", "reversed", "shuffled"):
        with program_order(order, seed=1):
            found[order] = copied(1, blocks=PROGRAMS + 1, in_place=True).tolist()
    assert found["forward"] != found["reversed"] and found["shuffled"] not in (found["forward"], found["reversed"])
    with program_order("shuffled"):
        assert copied(0).tolist() == [*range(PROGRAMS * SIZE)]


def test_what_is_not_written_is_nan() -> None:
    with poisoned_memory():
        found = copied(0, blocks=PROGRAMS + 1)
        assert found[: PROGRAMS * SIZE].tolist() == [*range(PROGRAMS * SIZE)] and found[-SIZE:].isnan().all()
        assert int(found.new_empty(1, dtype=torch.int64)) > 2**60 and bool(torch.empty_like(found).isnan().all())


FAULTS: list[tuple[str, Any]] = [
    ("copy_kernel: a store outside all arguments at test_sanitizer.py", lambda: copied(1)),
    ("copy_kernel: a load outside all arguments at test_sanitizer.py", lambda: copied(0, blocks=PROGRAMS - 1)),
    ("copy_kernel: a program loads at test_sanitizer.py", lambda: copied(1, blocks=PROGRAMS + 1, in_place=True)),
    ("lead_kernel: two programs store to one byte", lambda: lead_kernel[(2,)](torch.ones(2), torch.ones(4), SIZE=4)),
]


@pytest.mark.parametrize(("words", "launch"), FAULTS, ids=[words for words, _ in FAULTS])
def test_a_fault_is_found(words: str, launch: Any) -> None:
    with checked_launches() as findings, pytest.raises(Exception, match=words):
        launch()
    assert findings and all(finding.startswith(words) for finding in findings)


def test_a_launch_without_faults_is_left_alone() -> None:
    with checked_launches() as findings:
        copied(0)
        copied(0, in_place=True)
    assert not findings
