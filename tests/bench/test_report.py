"""The report of a committed run of a tiny pair, in which one method fails when greedy and one cannot run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stree.bench.report import HEADINGS, cells, load_runs, markdown, write_page
from stree.bench.summary import interval, pool, summarise
from stree.bench.verdict import verdict_text
from stree.cli import main

RUN = Path(__file__).resolve().parent / "data_run"
METHODS = ["plain", "transformers", "mamba-ssm", "chain:1-2", "chain:4", "dyspec:5", "unrolled:static:2,2", "suffix"]

Rows = dict[tuple[str, float, str], dict[str, Any]]


def summary_of(records: list[dict[str, Any]]) -> Rows:
    return {(row["suite"], row["temperature"], row["method"]): row for row in summarise(records)}


@pytest.fixture
def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def rows(records: list[dict[str, Any]]) -> Rows:
    return summary_of(records)


def timed(records: list[dict[str, Any]], suite: str, temperature: float, method: str) -> list[dict[str, Any]]:
    at = [r for r in records if r["metric"] == "tokens_per_s" and r["provider"] == method]
    return [r for r in at if (r["params"]["suite"], r["params"]["temperature"]) == (suite, temperature)]


def test_every_method_has_a_row_a_suite_and_temperature(rows: Rows) -> None:
    assert set(rows) == {(s, t, m) for s in ("code", "mt_bench") for t in (0.0, 0.8) for m in METHODS}
    status = {key: row["status"] for key, row in rows.items()}
    assert {key[2] for key, value in status.items() if value == "unavailable"} == {"mamba-ssm"}
    assert {key[2] for key, value in status.items() if value == "failed"} == {"unrolled:static:2,2"}
    verdicts = [rows["code", 0.0, method]["lossless"] for method in ("mamba-ssm", "unrolled:static:2,2")]
    assert verdicts == [None, False], "what cannot run is not called wrong"


def test_figures_are_sums_over_prompts(rows: Rows, records: list[dict[str, Any]]) -> None:
    row, of = rows["code", 0.8, "dyspec:5"], timed(records, "code", 0.8, "dyspec:5")
    tokens = sum(len(text) for record in of for run in record["tokens"] for text in run)
    assert row["tokens_per_s"] == pytest.approx(tokens / sum(6 / record["p50"] for record in of))
    steps = sum(record["steps"] for record in of)
    assert row["tau"] == pytest.approx(sum(record["sequence_steps"] * record["tau"] for record in of) / steps)
    assert row["draft_ms"] == pytest.approx(1e3 * sum(record["draft_s"] for record in of) / steps)
    assert row["prompts"] == 2 and row["verified"] == 5


def test_speed_ups_are_paired_over_the_same_prompts(rows: Rows, records: list[dict[str, Any]]) -> None:
    plain, suffix = (timed(records, "code", 0.0, method) for method in ("plain", "suffix"))
    wanted = sum(1 / record["p50"] for record in plain) / sum(1 / record["p50"] for record in suffix)
    assert rows["code", 0.0, "suffix"]["over_plain"] == (pytest.approx(wanted), None, None), "two prompts"
    chains = {m: rows["code", 0.0, m]["tokens_per_s"] for m in ("chain:1-2", "chain:4")}
    fastest = max(chains, key=lambda name: chains[name])
    assert rows["code", 0.0, fastest]["over_chain"][:1] == (1.0,)


def test_batches_weigh_as_much_as_their_prompts_and_turns_of_one_count_as_one(records: list[dict[str, Any]]) -> None:
    blocks = []
    for method, speeds in (("plain", (100.0, 100.0)), ("suffix", (100.0, 200.0))):
        example = timed(records, "mt_bench", 0.0, method)[0]
        for batch, count in enumerate((1, 4)):
            for turn in range(2):
                params = example["params"] | {"batch": batch, "turn": turn, "prompts": [*range(count)]}
                blocks.append(example | {"params": params, "p50": speeds[batch]})
    row = summary_of(blocks)["mt_bench", 0.0, "suffix"]
    assert row["over_plain"][0] == pytest.approx((1 + 4) / (1 + 4 / 2)) and row["samples"] == 2, "not four"


def test_a_timed_output_that_is_wrong_takes_the_figures_away(records: list[dict[str, Any]]) -> None:
    record = timed(records, "mt_bench", 0.0, "dyspec:5")[1]
    record |= {"lossless": False, "first_divergence": 3, "logit_gap": 0.5, "logit_scale": 2.0}
    for method in ("plain", "chain:4"):
        timed(records, "code", 0.0, method)[0]["lossless"] = False
    rows = summary_of(records)
    row = rows["mt_bench", 0.0, "dyspec:5"]
    assert row["status"] == "failed" and "tokens_per_s" not in row and row["logit_gap"] == 0.5
    row, chain = rows["code", 0.0, "dyspec:5"], rows["code", 0.0, "chain:1-2"]
    assert row["over_plain"] is None, "plain has no figures"
    assert row["over_chain"][0] == pytest.approx(row["tokens_per_s"] / chain["tokens_per_s"])


def test_verdicts_say_how_an_output_was_checked(rows: Rows, records: list[dict[str, Any]]) -> None:
    verifier = rows["code", 0.8, "dyspec:5"]["verifier"]
    assert verdict_text(rows["code", 0.0, "plain"]) == "identical (greedy)"
    assert verdict_text(rows["code", 0.8, "suffix"]) == "identical (match)"
    assert verdict_text(rows["code", 0.8, "dyspec:5"]) == f"greedy identical, distribution untested ({verifier})"
    assert verdict_text(rows["code", 0.0, "mamba-ssm"]) == "cannot run: mamba-ssm needs a CUDA device"
    assert verdict_text(rows["code", 0.0, "unrolled:static:2,2"]).startswith("FAILS: differs, logit gap")
    for record in records:
        if record["metric"] == "check" and record["provider"] == "dyspec:5":
            record |= {"lossless": True, "p_value": 0.25, "num_tokens": 90}
    for record, gap in zip(timed(records, "mt_bench", 0.0, "chain:4"), (1e-4, -3e-4), strict=False):
        record |= {"lossless": True, "logit_gap": gap, "logit_scale": 2.0}
    rows = summary_of(records)
    assert verdict_text(rows["code", 0.8, "dyspec:5"]) == f"distribution not rejected, p = 0.25, 90 tokens ({verifier})"
    assert verdict_text(rows["mt_bench", 0.0, "chain:4"]) == "near-ties, gap <= 1e-04 of scale (greedy)"


def times(base: Any, other: Any, axis: int = -1) -> Any:
    return base.sum(axis) / other.sum(axis)


def test_the_interval_is_paired_and_needs_three_prompts() -> None:
    base = [1.0, 10.0, 100.0, 1000.0]  # prompts differ far more than methods do
    assert interval(times, base, [value / 2 for value in base]) == pytest.approx((2.0, 2.0, 2.0))
    value, low, high = interval(times, base, [0.5, 6.0, 45.0, 550.0])
    assert low is not None and high is not None and 1.2 < low < value < high < 2.8
    assert interval(times, [1.0, 1.0], [2.0, 2.0]) == (0.5, None, None)


@pytest.mark.parametrize("drift", [0.0, 0.05], ids=["steady", "drifting"])
@pytest.mark.parametrize("prompts", [3, 5, 10, 50])
def test_intervals_of_equal_methods_hold_1_as_often_as_they_say(prompts: int, drift: float) -> None:
    """Prompts differ by 30 %, noise is 8 % a prompt, and the machine drifts for both methods alike."""
    rng, runs = np.random.default_rng(0), 1000
    seconds = np.exp(0.3 * rng.standard_normal((runs, prompts)))
    seconds *= np.exp(drift * rng.standard_normal((runs, prompts)).cumsum(-1))
    both = seconds * np.exp(0.08 * rng.standard_normal((2, runs, prompts)))
    found = [interval(times, own, other) for own, other in zip(*both, strict=True)]
    assert 0.93 < np.mean([low <= 1 <= high for _, low, high in found if low is not None and high is not None]) < 0.97


def test_the_page_and_the_table_show_every_method(rows: Rows, tmp_path: Path) -> None:
    lines = markdown(list(rows.values())).splitlines()
    assert re.match(r"\| suite +\| T +\| method +\| tokens/s", lines[0])
    assert len(lines) == 2 + 4 * len(METHODS) and len({line.count("|") for line in lines}) == 1
    assert sum("| dyspec:5 (layers) " in line for line in lines) == 4
    row = rows["code", 0.0, "dyspec:5"]
    heap = {**row, "growth": row["growth"].replace("form='layers'", "form='heap'")}
    assert "| dyspec:5 (heap) |" in markdown([heap])
    write_page(load_runs([RUN]), tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text()
    assert not re.search(r"<link|<img|src=|fetch|@import|url\((?!#)|https?://(?!www\.w3\.org/)", page)
    for text in (*METHODS, *HEADINGS.values(), "a processor", "stree bench run"):
        assert text.replace("'", "&#39;") in page, text


def test_tau_has_an_interval_and_is_not_shown_where_it_was_counted_otherwise(records: list[dict[str, Any]]) -> None:
    def pooled(method: str) -> dict[str, Any]:
        return next(row for row in pool(records, summarise(records)) if row["method"] == method)

    assert re.fullmatch(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", cells(pooled("dyspec:5"))["tau"])
    before = pooled("suffix")["tau"]
    for record in records:
        if record["provider"] == "suffix":  # as if transformers had drafted, and the record did not say how it counts
            record["params"] = {**record["params"], "drafter": "transformers-lookup"}
    row = pooled("suffix")
    assert row["tau"] is None and cells(row)["tau"] == "-" and cells(row)["over_plain"] != "-"
    for record in records:
        record["rows"] = []
    assert pooled("suffix")["tau"] == before


def test_ratios_of_two_methods_are_over_the_prompts_of_all_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(RUN), "--ratios", "suffix/plain", "plain/plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| suffix", "plain", "0"], ["| suffix", "plain", "0.8"], ["| plain", "plain", "0"], ["| plain", "plain", "0.8"]
    ]  # fmt: skip
    assert lines[0] == "| method | over | T | texts | speed [95%] | tau [95%] |"
    assert lines[-1].endswith("| 1.00 | 1.00 |")
    capsys.readouterr()
    for name in ("latex", "csv", "acceptance"):
        assert main(["bench", "report", str(RUN), f"--{name}", "--ratios", "suffix/plain"]) == 2
        assert f"--ratios prints a Markdown table; leave --{name} out" in capsys.readouterr().err
    for pair, message in (("suffix/other", "got other"), ("suffix", "--ratios must be METHOD/METHOD, got 'suffix'")):
        assert main(["bench", "report", str(RUN), "--ratios", pair]) == 2
        assert message in capsys.readouterr().err


def test_ratios_take_methods_whose_options_hold_slashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "sequoia:8,rates=0.6/0.2/0.1"
    for path in RUN.iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("suffix", name))
    assert main(["bench", "report", str(tmp_path), "--ratios", f"{name}/plain", f"plain/{name}", f"{name}/{name}"]) == 0
    found = [tuple(line.strip("| ").split(" | ")[:2]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert found[::2] == found[1::2] == [(name, "plain"), ("plain", name), (name, name)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no run: there is no run\.json in it"),
        ({"run.json": "{"}, r"run\.json cannot be read"),
        ({"run.json": '{"config": {}, "sessions": []}'}, r"run\.json cannot be read: its last session has no command"),
        ({"run.json": '{"config": {}, "sessions": [{"command": ""}]}'}, "holds no results yet"),
    ],
)
def test_a_directory_without_a_run_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_runs([tmp_path])
    with pytest.raises(ValueError, match="every directory needs a name of its own"):
        load_runs([RUN, RUN])


def test_a_closed_pipe_ends_a_command_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdout.write", closed)
    assert main(["bench", "report", str(RUN), "--csv"]) == 141
    assert capsys.readouterr().err == ""
