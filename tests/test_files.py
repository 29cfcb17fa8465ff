"""A file that cannot be written whole leaves the old one, nothing beside it, and one line with path and cause.

Run: python -m pytest tests/test_files.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.calls import full_disk
from safetensors.torch import save_file

from stree.bench.records import append
from stree.files import check_folder, replacing
from stree.retrieval import Datastore
from stree.vocabulary import save_vocabulary


def save_tensors(path: Path) -> None:
    """Save tensors as training does."""
    with replacing(path) as beside:
        save_file({"weight": torch.zeros(4096)}, beside)


WRITERS: dict[str, Callable[[Path], object]] = {
    "tensors": save_tensors,
    "vocabulary": lambda path: save_vocabulary(path, list(range(4000)), 5000),
    "datastore": lambda path: Datastore.build([[token % 97 for token in range(9000)]], 97).save(path),
    "records": lambda path: append(path, [{"figure": "x" * 9000}]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_and_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old\n", "utf-8")
    with full_disk(4096), pytest.raises(ValueError, match=rf"^cannot write {path}: .*[Ff]ile too large"):
        WRITERS[name](path)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_text("utf-8").startswith("old\n"), "records are appended, other files replaced"
    WRITERS[name](path)
    assert path.stat().st_size > 4096


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write into read-only folders")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    for write in WRITERS.values():
        with pytest.raises(ValueError, match="read-only|Permission denied"):
            write(tmp_path / "file")
    with pytest.raises(ValueError, match=f"cannot write {tmp_path / 'new'}: {tmp_path} is read-only"):
        check_folder(tmp_path / "new")
