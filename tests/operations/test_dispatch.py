"""What the host may read of a tensor, copies to a device, constants that threads share, and the cache of numba."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numba
import pytest
import torch
from helpers.calls import full_disk, together
from torch import Tensor

from stree.kernels import dispatch, ops
from stree.kernels.constants import constant
from stree.kernels.cpu_jit import compiled
from stree.kernels.dispatch import (
    as_on_device,
    backend_of,
    fixes_shapes,
    host_bound,
    is_known_all,
    may_have_any,
    most_true,
)
from stree.kernels.host_copies import HostCopy, upload


def test_bounds_are_exact_where_the_host_can_read_and_safe_where_it_cannot() -> None:
    numbers, mask = torch.tensor([3, 1]), torch.tensor([[True, False, False], [False, True, True]])
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert (host_bound(numbers, 9), most_true(mask), most_true(nothing)) == (3, 2, 0)
    assert may_have_any(mask) and not may_have_any(nothing)
    assert is_known_all(~nothing) and not is_known_all(mask)
    assert backend_of(numbers) == "cpu" and not fixes_shapes(numbers)
    with as_on_device(triton=False):
        assert (host_bound(numbers, 9), most_true(mask), most_true(nothing)) == (9, 3, 3)
        assert host_bound(numbers, 9, waits=True) == 3
        assert may_have_any(nothing) and not is_known_all(~nothing)
        assert backend_of(numbers) == "reference" and fixes_shapes(numbers)
    with as_on_device():
        assert backend_of(numbers) == "triton"


@pytest.mark.parametrize("host_can_read", [True, False])
def test_an_upload_keeps_values_dtypes_and_shapes(host_can_read: bool) -> None:
    parts = [torch.tensor([[2**40, -1], [5, 6]]), torch.tensor([[-1, 7], [8, 9]], dtype=torch.int32), torch.rand(2, 2)]
    with as_on_device(triton=False, host_can_read=host_can_read):
        copies = upload(parts, parts[0])
    for one, other in zip(copies, parts, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert torch.equal(HostCopy(parts[0]).read(), parts[0])


def test_an_operation_is_bound_once_for_what_its_choice_depends_on() -> None:
    words = torch.arange(6).unbind(0)
    counters = [word.view(1) for word in words[:3]]
    on_host = ops.philox_uniform(*counters, seed=3)
    with as_on_device(triton=False):
        assert torch.equal(ops.philox_uniform(*counters, seed=3), on_host)
        found = dispatch.choose("philox_uniform", "auto", counters[0])
    assert found is dispatch.choose("philox_uniform", "reference", counters[0])
    own = dispatch.choose("philox_uniform", "auto", counters[0])
    assert own is not found and own.__module__ == "stree.kernels.sampling.cpu"
    with pytest.raises(ValueError, match="backend must be 'auto', 'reference' or 'triton', got 'cpu'"):
        dispatch.choose("philox_uniform", "cpu", counters[0])  # type: ignore[arg-type]


def test_threads_that_make_a_constant_at_once_get_one_object() -> None:
    @constant
    def zeros(size: int) -> Tensor:
        time.sleep(0.05)  # so that every thread begins before one has made it
        return torch.zeros(size)

    found = together(lambda number: zeros(3 + number % 2), 4)
    assert found[0] is found[2] and found[1] is found[3] and [len(one) for one in found[:2]] == [3, 4]
    assert zeros(3) is found[0]


def double(number: int) -> int:
    return 2 * number


def test_functions_are_compiled_without_a_cache_where_no_folder_can_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    # Only the folder of NUMBA_CACHE_DIR may be used, and there is none.
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(double)
    with caplog.at_level(logging.WARNING, "stree"):
        assert [compiled(double)(4), compiled(double)(5)] == [8, 10]
    assert [record.getMessage() for record in caplog.records] == [
        "numba keeps no compiled code: no folder can be written; set NUMBA_CACHE_DIR to a folder that can be written"
    ]
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "Misspelt")
    with pytest.raises(RuntimeError, match="Misspelt"):
        compiled(double)


def test_damaged_files_of_the_cache_are_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def doubled() -> list[float]:
        function = compiled(double)
        return [function(4), function(0.5)]

    with caplog.at_level(logging.WARNING, "stree"), full_disk(100):
        assert doubled() == [8, 1.0]
    assert "File too large" in caplog.text and not [*tmp_path.rglob("*.nbc")]
    assert doubled() == [8, 1.0]
    (index,), files = tmp_path.rglob("*.nbi"), sorted(tmp_path.rglob("*.nbc"))
    whole = [file.read_bytes() for file in files]
    for file, damaged in ((index, b""), (files[0], b"torn"), (files[0], whole[1])):  # the last: of another signature
        file.write_bytes(damaged)
        assert doubled() == [8, 1.0]
        assert file.stat().st_size > len(b"torn") and len([*tmp_path.rglob("*.nbc")]) == 2
