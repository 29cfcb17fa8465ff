"""The directory of a run: when it can be resumed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stree.bench.directory import RunDirectory, finished_keys, key_of
from stree.bench.methods import parse_methods
from stree.bench.plan import Block, Settings
from stree.bench.records import Record


def record(metric: str, batch: int, provider: str = "plain", temperature: float = 0.0, **more: Any) -> Record:
    params = {"suite": "mine", "batch": batch, "turn": 0, "temperature": temperature}
    return {"metric": metric, "provider": provider, "params": params, **more}


def test_a_directory_of_another_configuration_is_refused_unless_forced(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", {"methods": "plain"}, {}).add([record("check", 0)])
    with pytest.raises(
        ValueError, match="holds a run with methods 'plain', not 'chain:2'; choose another --out, or --f"
    ):
        RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {})
    with pytest.raises(ValueError, match="holds a run with seed None, not 3"):
        RunDirectory(tmp_path / "run", {"methods": "plain", "seed": 3}, {})
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    anew = RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {"device": "new"}, force=True)
    assert anew.records == [] and (tmp_path / "run" / "results.jsonl.old").read_bytes() == before
    assert json.loads((tmp_path / "run" / "run.json").read_text())["sessions"] == [{"device": "new"}]


def test_a_run_is_resumed_with_its_own_configuration_and_notes_every_start(tmp_path: Path) -> None:
    for _ in range(2):
        RunDirectory(tmp_path, {"temperatures": (0.0, 1.0)}, {"device": "here"})
    assert json.loads((tmp_path / "run.json").read_text())["sessions"] == [{"device": "here"}] * 2


def test_timed_records_of_unfinished_blocks_are_dropped_from_disk_and_memory(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, {}, {})
    whole = [record("tokens_per_s", 0), record("check", 1)]
    directory.add([record("tokens_per_s", 1), *whole])
    directory.keep([key_of(whole[0])])
    assert directory.records == whole == RunDirectory(tmp_path, {}, {}).records


@pytest.mark.parametrize("text", ["{", "[]", '{"config": {}}', None])
def test_a_damaged_run_file_is_named(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "results.jsonl").write_text("")
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json"):
        RunDirectory(tmp_path, {}, {})
    assert RunDirectory(tmp_path, {}, {}, force=True).records == []
    assert (tmp_path / "results.jsonl.old").exists()


@pytest.mark.parametrize("status", ["failed", "unavailable"])
def test_a_batch_is_finished_when_every_method_has_run_it_or_cannot(status: str) -> None:
    keys = [("mine", batch, 0, temperature) for temperature in (0.0, 1.0) for batch in range(3)]
    found = [
        record("check", 0, "chain:2", status=status),  # of the whole suite at this temperature
        record("check", 0, "plain", status="ok"),
        record("tokens_per_s", 0),
        record("tokens_per_s", 0, "plain", 1.0),
        record("skipped", 2, "none"),
    ]
    finished = finished_keys([Block(key, ()) for key in keys], parse_methods("plain,chain:2"), found)
    assert finished == {keys[0], keys[2]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2, got 1"),
        ({"temperatures": (0.0, 100.0)}, r"temperatures must be in \[0, 100\), got \[0.0, 100.0\]"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)
