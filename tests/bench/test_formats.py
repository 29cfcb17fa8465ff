"""Rows as CSV, LaTeX and acceptance by position, the bound of perfect drafts, and what has not run yet."""

from __future__ import annotations

import copy
import csv
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from stree.bench.acceptance import acceptance_by_depth, most_tokens
from stree.bench.formats import acceptance_table, csv_rows, latex
from stree.bench.report import cells, load_runs, write_page
from stree.bench.summary import summarise
from stree.cli import main

RUN = Path(__file__).resolve().parent / "data_run"


@pytest.fixture
def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "results.jsonl").read_text().splitlines()]


def row_of(records: list[dict[str, Any]], method: str) -> dict[str, Any]:
    return next(row for row in summarise(records) if (row["suite"], row["method"]) == ("code", method))


def test_csv_has_every_row_and_the_ends_of_every_interval(records: list[dict[str, Any]]) -> None:
    rows = summarise(records)
    found = list(csv.DictReader(csv_rows([("a", rows), ("b", rows)]).splitlines()))
    assert len(found) == 2 * len(rows) and [line["run"] for line in found[:: len(rows)]] == ["a", "b"]
    for line, row in zip(found, rows, strict=False):
        assert (line["suite"], line["method"], line["status"]) == (row["suite"], row["method"], row["status"])
        if row["status"] == "ok":
            assert float(line["tokens_per_s"]) == row["tokens_per_s"] and float(line["tau"]) == row["tau"]
            assert line["tau_low"] == ("" if row["tau_interval"][1] is None else str(row["tau_interval"][1]))


def test_a_latex_table_has_intervals_and_escapes_names(records: list[dict[str, Any]], tmp_path: Path) -> None:
    row = {**row_of(records, "chain:4"), "method": "fused_8%#2", "tau_interval": (2.5, 2.25, 2.75)}
    text = latex(
        [row, row_of(records, "mamba-ssm"), {**row, "unfinished": "1 of 2 texts"}],
        "stree bench run --x 50%",
        "commit abc",
    )
    lines = text.splitlines()
    assert lines[:2] == ["% stree bench run --x 50%", "% commit abc"]
    few = latex([{**row, "samples": 2, "lossless": None}], "")
    assert "% Intervals need at least 3 prompts" in few and "% distribution untested" in few and "95" not in few
    assert any(r"fused\_8\%\#2" in line and line.endswith(r"& 2.50 [2.25, 2.75] \\") for line in lines)
    assert any(r"\multicolumn{4}{l}{cannot run: mamba-ssm needs a CUDA device} \\" in line for line in lines)
    assert all(line.count("&") in (3, 6) for line in lines if line.endswith(r"\\")) and "*" in lines[-4]
    if which("pdflatex"):
        document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}" + "\n\\end{document}"
        (tmp_path / "t.tex").write_text(document)
        subprocess.run(["pdflatex", "-interaction=batchmode", "t.tex"], cwd=tmp_path, check=True)


def test_acceptance_by_position_is_pooled_over_steps(records: list[dict[str, Any]]) -> None:
    blocks = [  # of 10 steps 8 accept a node at depth 1 and 4 at depth 2; of 30 steps 3, and none
        {"sequence_steps": 10, "acceptance_by_depth": [0.8, 0.5]},
        {"sequence_steps": 30, "acceptance_by_depth": [0.1]},
    ]
    assert acceptance_by_depth(blocks) == pytest.approx([11 / 40, 4 / 11])
    assert acceptance_by_depth([{"sequence_steps": 5, "acceptance_by_depth": []}]) == []
    lines = acceptance_table(summarise(records)).splitlines()
    assert lines[0].startswith("| suite | T | method | tau [95%] | output tokens/s | user tokens/s | 1 | 2 |")
    assert len({line.count("|") for line in lines}) == 1 and not any("mamba-ssm" in line for line in lines)


def test_the_bound_is_the_speed_of_the_same_steps_with_every_draft_right(records: list[dict[str, Any]]) -> None:
    """Made by hand: prefill 1 s, then 12 steps of 0.5 s for 24 tokens, 5 tokens each if all 4 layers were right."""
    made = []
    for record in records:
        if record["metric"] == "tokens_per_s" and record["provider"] in ("plain", "chain:4"):
            record = copy.deepcopy(record)
            is_plain, count = record["provider"] == "plain", 25
            record |= {"tokens": [[[1] * count]], "p50": count / (25.0 if is_plain else 7.0), "ttft_s": 1.0}
            record |= {"steps": 24 if is_plain else 12, "tau": 1.0 if is_plain else 2.0, "prefill_s": 1.0}
            record |= {"draft_calls": 0 if is_plain else 48, "verified": record["steps"] * (1 if is_plain else 5)}
            record |= {"sequence_steps": record["steps"], "rows": [{}]}
            made.append(record)
    row = row_of(made, "chain:4")
    assert row["perfect_over_plain"] == pytest.approx(25 / (1 + 6 * 2 / 5))
    assert row["over_plain"][0] == pytest.approx(25 / 7) and row["user_tokens_per_s"] == pytest.approx(24 / 6)
    assert row_of(made, "plain")["perfect_over_plain"] == pytest.approx(1.0)
    assert cells(row)["perfect_over_plain"] == f"{row['perfect_over_plain']:.2f}"


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ({"drafter": "model", "draft_calls": 4.0, "verified": 13.0}, 5.0),
        ({"drafter": "model", "draft_calls": 8.0, "verified": 4.0}, 4.0),
        ({"drafter": "model", "draft_calls": 1.0, "verified": 9.0, "drafts_blocks": True}, 9.0),
        ({"drafter": "suffix", "draft_calls": 0.0, "verified": 16.0}, 16.0),
        ({"drafter": "transformers", "draft_calls": 0.0, "verified": 1.0}, 1.0),
    ],
)
def test_a_perfect_step_is_as_deep_as_its_draft_calls_or_its_nodes(own: dict[str, Any], wanted: float) -> None:
    assert most_tokens({"drafts_blocks": False, "tau": 1.5, **own}) == wanted


def test_what_has_not_run_yet_is_marked(records: list[dict[str, Any]], tmp_path: Path) -> None:
    config = {
        "suites": {"code": {"prompts": 3, "file": ""}, "mt_bench": {"prompts": 1, "turns": 2, "file": ""}},
        "temperatures": [0.0, 0.8], "methods": ["plain (auto)", "suffix (auto)", "late (auto)"], "seed": [0, 1],
    }  # fmt: skip
    session = {"command": "stree bench run"}
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "sessions": [session]}))
    params = {"suite": "code", "batch": 2, "turn": 0, "temperature": 0.0, "prompts": [2]}
    skipped = {"metric": "skipped", "provider": "plain", "params": params, "reason": "too long"}
    first = {"suite": "mt_bench", "temperature": 0.0, "turn": 0}
    kept = [r for r in records if r["params"].get("suite") == "code" or first.items() <= r["params"].items()]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*kept, skipped]))
    (run,) = load_runs([tmp_path])
    outputs = {(row["suite"], row["temperature"], row["method"]): cells(row)["output"] for row in run.rows}
    assert outputs["code", 0.0, "plain"] == "identical (greedy)", "the third prompt is too long"
    assert outputs["code", 0.8, "plain"].startswith("UNFINISHED, 2 of 6 texts; ")
    assert outputs["mt_bench", 0.0, "plain"].startswith("UNFINISHED, 1 of 2 texts; "), "without the second turn"
    assert outputs["mt_bench", 0.8, "suffix"] == outputs["code", 0.0, "late"] == "UNFINISHED: not run yet"
    write_page([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("not run yet") == 2 * 3


def test_the_formats_are_options_of_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, begins in (("--csv", "run,suite"), ("--latex", "% stree bench run"), ("--acceptance", "| suite")):
        assert main(["bench", "report", str(RUN), option]) == 0
        assert capsys.readouterr().out.startswith(begins)
        assert main(["bench", "report", str(RUN), option, "--out", str(tmp_path)]) == 2
        assert f"{option} only prints a table" in capsys.readouterr().err


@pytest.mark.slow
def test_many_runs_have_a_page_each(tmp_path: Path) -> None:
    (run,) = load_runs([RUN])
    names = [f"run{number}" for number in range(5)]
    write_page([replace(run, name=name) for name in names], tmp_path / "report.html")
    page, own = ((tmp_path / name).read_text() for name in ("report.html", "report-run3.html"))
    assert all(f'<a href="report-{name}.html">{name}</a>' in page for name in names) and "<table" not in page
    assert own.count("<table") == 1 and '<a href="report.html">all runs</a>' in own


def test_records_without_rows_are_refused_by_name(records: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((RUN / "run.json").read_text())
    tuning = next(record for record in records if record["metric"] == "tuning")
    (tmp_path / "results.jsonl").write_text(json.dumps(tuning) + "\n")
    with pytest.raises(ValueError, match=f"{tmp_path} holds records, but no method has been checked or measured yet"):
        load_runs([tmp_path])
    left_out = tuning | {"metric": "skipped", "reason": "a prompt and 64 new tokens exceed 4096"}
    (tmp_path / "results.jsonl").write_text(json.dumps(left_out) + "\n")
    with pytest.raises(ValueError, match="but every prompt was left out: a prompt and 64 new tokens exceed 4096"):
        load_runs([tmp_path])
