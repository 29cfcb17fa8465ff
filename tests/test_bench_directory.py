"""The directory of a run, and settings: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stree.bench import records
from stree.bench.directory import RunDirectory
from stree.bench.plan import Settings


def test_a_directory_of_another_configuration_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", {"methods": "plain"}, {}).add([{"metric": "check", "params": {}}])
    with pytest.raises(
        ValueError, match="holds a run with methods 'plain', not 'chain:2'; choose another --out, or --f"
    ):
        RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {})
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    anew = RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {}, force=True)
    assert anew.records == [] and (tmp_path / "run" / "results.jsonl.old").read_bytes() == before


@pytest.mark.parametrize("text", ["{", "[]", '{"config": {}}'])
def test_a_broken_run_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        RunDirectory(tmp_path, {}, {})
    assert RunDirectory(tmp_path, {}, {}, force=True).records == []


def test_results_without_a_run_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds results without a run\.json; choose another --out"):
        RunDirectory(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("line", "message"), [("{", "is not JSON"), ("[]", "is no benchmark record"), ("{}", "is no benchmark record")]
)
def test_a_broken_line_that_is_not_the_last_is_named(tmp_path: Path, line: str, message: str) -> None:
    RunDirectory(tmp_path, {}, {})
    (tmp_path / "results.jsonl").write_text(f'{{"metric": "check"}}\n{line}\n{{"metric": "check"}}\n')
    with pytest.raises(ValueError, match=rf"line 2 of .*results\.jsonl {message}"):
        RunDirectory(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens must be at least 2, got 1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"temperatures": (-1.0,)}, r"temperatures must be in \[0, 100\), got \[-1.0\]"),
        ({"seed": -1}, "seed and law_texts must not be negative, got -1 and 0"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**options)


def test_the_commit_is_none_of_a_repository_that_merely_holds_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ROOT", records.ROOT / "tests")
    found = records.environment()
    assert found["commit"] == "" and found["dirty"] is False
