"""numba's options for all functions of the package."""

from __future__ import annotations

import logging

import numba
import pytest

from stree.kernels.numba_jit import compiled


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
        "numba keeps no compiled code: no folder can be written; set NUMBA_CACHE_DIR to one"
    ]
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "Misspelt")
    with pytest.raises(RuntimeError, match="Misspelt"):
        compiled(double)
