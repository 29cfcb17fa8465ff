"""The directory of a run: when it can be resumed, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stree.bench.directory import RunDirectory
from stree.bench.records import read


def test_a_directory_of_another_configuration_is_refused_unless_forced(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", {"methods": "plain"}, {}).add([{"metric": "check", "params": {}}])
    with pytest.raises(
        ValueError, match="holds a run with methods 'plain', not 'chain:2'; choose another --out, or --f"
    ):
        RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {})
    with pytest.raises(ValueError, match="holds a run with seed None, not 3"):
        RunDirectory(tmp_path / "run", {"methods": "plain", "seed": 3}, {})
    two, three = ({"suites": {"code": {"prompts": count, "file": "f"}}} for count in (2, 3))
    RunDirectory(tmp_path / "other", two, {})
    with pytest.raises(ValueError, match=r"holds a run with 2 prompts of the suite code, not 3 \(--limit\)"):
        RunDirectory(tmp_path / "other", three, {})
    with pytest.raises(ValueError, match="holds a run with settings of an earlier version; choose another --out"):
        RunDirectory(tmp_path / "other", {"suites": {"code": {"prompts": 2, "turns": 2, "file": "f"}}}, {})
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    anew = RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {"device": "new"}, force=True)
    assert anew.records == [] and (tmp_path / "run" / "results.jsonl.old").read_bytes() == before
    assert json.loads((tmp_path / "run" / "run.json").read_text())["sessions"] == [{"device": "new"}]
    anew.add([{"metric": "check", "params": {}}])
    assert RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {}, force=True).records == []


def test_a_run_is_resumed_with_its_own_configuration_and_notes_every_start(tmp_path: Path) -> None:
    for _ in range(2):
        RunDirectory(tmp_path, {"temperatures": (0.0, 1.0)}, {"device": "here"})
    assert json.loads((tmp_path / "run.json").read_text())["sessions"] == [{"device": "here"}] * 2


def test_a_packed_run_is_read_and_goes_on_unpacked(tmp_path: Path) -> None:
    results, records = tmp_path / "results.jsonl", [{"metric": "check", "params": {}}]
    RunDirectory(tmp_path, {}, {}).add(records)
    (tmp_path / "results.jsonl.gz").write_bytes(gzip.compress(results.read_bytes()))
    results.unlink()
    assert read(results) == records and not results.exists()
    packed = tmp_path / "results.jsonl.gz"
    for damaged in ((whole := packed.read_bytes())[:-9], whole[:12] + b"\xff" * 9 + whole[21:], b"no gzip"):
        packed.write_bytes(damaged)
        for use in (lambda: read(results), lambda: RunDirectory(tmp_path, {}, {})):
            with pytest.raises(ValueError, match=r"results\.jsonl\.gz cannot be read"):
                use()
    packed.write_bytes(whole)
    run = RunDirectory(tmp_path, {}, {})
    run.add([{"metric": "more", "params": {}}])
    assert [record["metric"] for record in read(results)] == ["check", "more"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["results.jsonl", "run.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"config": {}}', None])
def test_a_damaged_run_file_is_named(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "results.jsonl").write_text("")
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json"):
        RunDirectory(tmp_path, {}, {})
    assert RunDirectory(tmp_path, {}, {}, force=True).records == []
    assert (tmp_path / "results.jsonl.old").exists()
