"""GPU scripts start on a machine where nothing is installed and links were lost."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("benchmarks", "stree", "kernels", "models"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "benchmarks" / "__init__.py", tmp_path / "benchmarks")
    (tmp_path / "kernels" / "toy.py").write_text("VALUE = 3\n")
    return tmp_path


def run(copy: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; import benchmarks; from stree.kernels.toy import VALUE; print(VALUE)"
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=copy, env={"PATH": ""}, capture_output=True, text=True, check=False)


def test_lost_links_are_made_again_and_the_checkout_is_importable(copy: Path) -> None:
    result = run(copy)
    assert result.stdout.strip() == "3", result.stderr
    assert (copy / "stree" / "kernels").is_symlink() and (copy / "stree" / "models").is_symlink()


def test_a_file_in_the_place_of_a_link_is_named(copy: Path) -> None:
    (copy / "stree" / "kernels").write_text("../kernels")
    result = run(copy)
    assert result.returncode and "must be a link to ../kernels, got a file" in result.stderr
