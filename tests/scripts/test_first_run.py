"""The first run on a GPU: what it runs exists, goes on where it ended, and ends in one archive.

Run: python -m pytest tests/scripts/test_first_run.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import first_run, models, steps, suite
from benchmarks.gpu.supervise import Supervisor, Task
from stree.bench.records import append, read_lines

ROOT = Path(__file__).resolve().parents[2]
TOY = "import sys; from pathlib import Path; Path(sys.argv[1]).write_text('x'); " + (
    "from benchmarks.gpu.supervise import Progress; p = Progress(Path(sys.argv[3])); p.begin(0, 'toy'); "
    "p.end(is_over=False)"
)


def options(folder: Path, **changes: Any) -> Any:
    given = {"out": folder / "out", "expected": folder / "texts", "wheels": None, "cache": None, "archive": None,
             "parts": None, "minutes": 1.0, "peer_dir": None, "smoke": False}  # fmt: skip
    (folder / "out").mkdir(exist_ok=True)
    return SimpleNamespace(**given | changes)


def test_every_kind_model_and_test_that_is_named_exists(tmp_path: Path) -> None:
    assert sorted(first_run.KINDS) == sorted(suite.KINDS)
    assert {*first_run.TARGETS, *first_run.DRAFTERS} <= models.configurations(smoke=False).keys()
    assert {*first_run.TINY} == models.configurations(smoke=True).keys()
    file, _, test = first_run.FAILING_CAPTURE.partition("::")
    assert f"def {test}(" in (ROOT / file).read_text() and len(first_run.kernel_tests(is_small=False)) > 10
    tasks = [task for part in first_run.parts_of(options(tmp_path)) for _, stage in part.stages for task in stage]
    assert len({task.name for task in tasks}) == len(tasks)
    order = [task.name for task in tasks if task.name.startswith("steps")]
    assert order[:3] == [f"steps 1x256, {name}" for name in first_run.TARGETS]
    assert steps.NODES[:3] == (1, 16, 64)


@pytest.mark.slow
def test_the_marker_of_gpu_tests_selects_what_a_first_run_tests() -> None:
    files = [*first_run.kernel_tests(is_small=False)[:2], "tests/operations/test_walk.py", first_run.LOOP]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    chosen = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert chosen == {*files} - {"tests/operations/test_walk.py"}


@pytest.mark.slow
def test_wheels_and_a_cache_that_were_brought_along_are_used(tmp_path: Path) -> None:
    wheels, info = tmp_path / "wheels", "toywheel-1.0.dist-info"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "toywheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toywheel.py", "VALUE = 3\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toywheel\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "kernel.cubin").write_text("code")
    (tmp_path / "__grp__kernel.json").write_text(
        json.dumps({"child_paths": {"kernel.cubin": "/gone/key/kernel.cubin"}})
    )
    with tarfile.open(tmp_path / "cache.tar.gz", "w:gz") as archive:
        for name in ("kernel.cubin", "__grp__kernel.json"):
            archive.add(tmp_path / name, f"key/{name}")
    given = options(tmp_path, wheels=wheels, cache=tmp_path / "cache.tar.gz")
    environment = first_run.environment_of(given)
    builds = Path(environment["TRITON_CACHE_DIR"]) / "key"
    paths = json.loads((builds / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {"kernel.cubin": str(builds / "kernel.cubin")} and Path(paths["kernel.cubin"]).read_text() == "code"
    assert environment["PYTHONPATH"].split(":")[0] == str(given.out / "site")
    assert (given.out / "site" / "toywheel.py").is_file()
    (wheels / "broken-1.0-py3-none-any.whl").write_text("no wheel")
    with pytest.raises(RuntimeError, match="pip could not install 2 wheels"):
        first_run.environment_of(options(tmp_path, out=tmp_path / "other", wheels=wheels))


def test_a_run_ends_in_an_archive_and_the_next_does_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(options: Any) -> list[first_run.Part]:
        tasks = [Task(f"toy {n}", (sys.executable, "-c", TOY, str(tmp_path / f"toy-{n}"))) for n in (1, 2)]
        return [first_run.Part(n, 1.0, ((1, [task]),)) for n, task in enumerate(tasks, 1)]

    monkeypatch.setattr(first_run, "parts_of", parts)
    arguments = ["first_run", "--out", str(tmp_path / "out"), "--archive", str(tmp_path / "back"), "--parts"]
    monkeypatch.setattr(sys, "argv", [*arguments, "1"])
    assert first_run.main() == 0 and (tmp_path / "toy-1").exists() and not (tmp_path / "toy-2").exists()
    (tmp_path / "toy-1").unlink()
    (tmp_path / "texts").write_text("{}")
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "--expected", str(tmp_path / "texts")])
    assert first_run.main() == 0 and not (tmp_path / "toy-1").exists() and (tmp_path / "toy-2").exists()
    with tarfile.open(tmp_path / "back" / "first_run.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    records = read_lines(tmp_path / "unpacked" / "first_run.jsonl")
    assert [r["task"] for r in records if r["bench"] == "task"] == ["toy 1", "toy 2"]
    assert records[0]["bench"] == "machine" and records[0]["packages"]["torch"] and all(records[0]["links"].values())
    append(tmp_path / "out" / "gpu_suite.jsonl", [{"bench": "ssd_step", "correct": False, "error": 0.5}])
    capsys.readouterr()
    assert first_run.main() == 1 and "failed: ssd_step: wrong, error 0.5" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", arguments[:-1])
    with pytest.raises(SystemExit):
        first_run.main()
    assert "--expected must be a file" in capsys.readouterr().err


@pytest.mark.slow
def test_of_tests_that_end_the_process_or_hang_the_others_have_records(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(
        "import os, time\n"
        "def test_right(): pass\n"
        "def test_crash(): os._exit(0)\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_hang(): time.sleep(60)\n"
        "def test_last(): pass\n"
    )
    (tmp_path / "test_unimportable.py").write_text("import a_module_that_is_missing\n")
    command = first_run._pytest(str(tmp_path), str(tmp_path), "--rootdir", str(tmp_path))
    environment = first_run.environment_of(options(tmp_path))
    Supervisor(tmp_path / "faults", time.monotonic() + 60, environment).run([Task("tests", command, 3.0)])
    found = {r["test"].split("::")[-1]: r["outcome"] for r in read_lines(tmp_path / "gpu_tests.jsonl")}
    assert found == {
        "test_unimportable.py": "failed", "test_right": "passed", "test_wrong": "failed", "test_last": "passed"
    }  # fmt: skip
    *faults, last = read_lines(tmp_path / "faults")
    assert [(r["case"].split("::")[-1], r["fault"]) for r in faults] == [
        ("test_crash", "crashed, exit status 0"), ("test_hang", "timed out, 3 s")
    ]  # fmt: skip
    assert last["status"] == "done"


def test_it_starts_with_the_standard_library_alone() -> None:
    command = [sys.executable, "-S", "-c", "import benchmarks.gpu.first_run"]
    result = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
