"""The directory of a run, and settings: what is refused, and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stree.bench import records
from stree.bench.directory import RunDirectory, key_of
from stree.bench.methods import parse_methods
from stree.bench.plan import Block, Settings, finished_keys
from stree.bench.records import Record


def test_a_directory_of_another_configuration_is_refused(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", {"methods": "plain"}, {}).add([{"metric": "check", "params": {}}])
    with pytest.raises(
        ValueError, match="holds a run with methods 'plain', not 'chain:2'; choose another --out, or --f"
    ):
        RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {})
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds a run with seed None, not 3"):
        RunDirectory(tmp_path / "run", {"methods": "plain", "seed": 3}, {})
    anew = RunDirectory(tmp_path / "run", {"methods": "chain:2"}, {"device": "new"}, force=True)
    assert anew.records == [] and (tmp_path / "run" / "results.jsonl.old").read_bytes() == before
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["sessions"] == [{"device": "new"}], "the machines of the run that was given up are not this one's"


def test_a_run_goes_on_with_the_configuration_that_json_made_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        RunDirectory(tmp_path, {"temperatures": (0.0, 1.0)}, {"device": "here"})
    assert json.loads((tmp_path / "run.json").read_text())["sessions"] == [{"device": "here"}] * 2


def test_what_is_not_finished_is_dropped_from_disk_and_memory(tmp_path: Path) -> None:
    def timed(batch: int) -> Record:
        params = {"suite": "mine", "batch": batch, "turn": 0, "temperature": 0.0}
        return {"metric": "tokens_per_s", "params": params}

    def sized(nodes: int) -> list[Record]:
        return [{"metric": metric, "params": {"nodes": nodes}} for metric in ("step_latency", "state_bytes")]

    directory = RunDirectory(tmp_path, {}, {})
    whole = [timed(0), *sized(4), {"metric": "sizes", "params": {"nodes": 4}}]
    directory.add([timed(1), *whole, *sized(8)])
    directory.keep([key_of(timed(0))])
    assert directory.records == whole == RunDirectory(tmp_path, {}, {}).records


def test_repeated_measurements_are_told_by_their_quantiles() -> None:
    values = [float(value) for value in range(11)]
    assert records.quantiles(values) == {"p20": 2.0, "p50": 5.0, "p80": 8.0, "runs": 11}


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
    assert RunDirectory(tmp_path, {}, {}, force=True).records == []
    assert (tmp_path / "results.jsonl.old").exists()


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
        ({"temperatures": (0.0, 100.0)}, r"temperatures must be in \[0, 100\), got \[0.0, 100.0\]"),
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


@pytest.mark.parametrize("status", ["failed", "unavailable"])
def test_a_batch_is_finished_when_every_method_has_run_it_or_cannot(status: str) -> None:
    def record(metric: str, batch: int, provider: str, temperature: float = 0.0, **more: Any) -> Record:
        params = {"suite": "mine", "batch": batch, "turn": 0, "temperature": temperature}
        return {"metric": metric, "provider": provider, "params": params, **more}

    keys = [("mine", batch, 0, temperature) for temperature in (0.0, 1.0) for batch in range(3)]
    found = [
        record("check", 0, "chain:2", status=status),  # of the whole suite at this temperature
        record("check", 0, "plain", status="ok"),
        record("tokens_per_s", 0, "plain"),
        record("tokens_per_s", 0, "plain", 1.0),
        record("skipped", 2, "none"),
    ]
    finished = finished_keys([Block(key, ()) for key in keys], parse_methods("plain,chain:2"), found)
    assert finished == {keys[0], keys[2]}
