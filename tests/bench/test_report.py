"""The report of a committed run of a tiny pair, in which one method fails when greedy and one cannot run."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from stree.bench.measures import make_record
from stree.bench.tables import HEADINGS, cells, verdict_text
from stree.bench.watch import Counts

from stree.bench.execute import Run
from stree.bench.report import load_runs, print_markdown, write_report
from stree.bench.summary import _more_tokens, _speedup, _times, best, interval, summarise

RUN = Path(__file__).resolve().parent / "data" / "bench_run"
METHODS = ["plain", "transformers", "mamba-ssm", "chain:1-2", "chain:4", "dyspec:5", "unrolled:static:2,2", "suffix"]


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(records: list[dict[str, Any]]) -> dict[tuple[str, float, str], dict[str, Any]]:
    return {(row["suite"], row["temperature"], row["method"]): row for row in summarise(records)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("report")
    text = io.StringIO()
    write_report(load_runs([RUN]), out, Console(file=text, width=100))
    return out, text.getvalue()


def timed(records: list[dict[str, Any]], suite: str, temperature: float, method: str) -> list[dict[str, Any]]:
    at = [r for r in records if r["metric"] == "tokens_per_s" and r["provider"] == method]
    return [r for r in at if (r["params"]["suite"], r["params"]["temperature"]) == (suite, temperature)]


def test_every_method_has_a_row_a_suite_and_temperature(rows: dict[Any, Any]) -> None:
    assert set(rows) == {(s, t, m) for s in ("code", "mt_bench") for t in (0.0, 0.8) for m in METHODS}
    status = {key: row["status"] for key, row in rows.items()}
    assert {key[2] for key, value in status.items() if value == "unavailable"} == {"mamba-ssm"}
    assert {key[2] for key, value in status.items() if value == "failed"} == {"unrolled:static:2,2"}
    verdicts = [rows["code", 0.0, method]["lossless"] for method in ("mamba-ssm", "unrolled:static:2,2")]
    assert verdicts == [None, False], "what cannot run is not called wrong"


def test_figures_are_sums_over_prompts(rows: dict[Any, Any], records: list[dict[str, Any]]) -> None:
    row, of = rows["code", 0.8, "dyspec:5"], timed(records, "code", 0.8, "dyspec:5")
    tokens = sum(len(text) for record in of for run in record["tokens"] for text in run)
    assert row["tokens_per_s"] == pytest.approx(tokens / sum(6 / record["p50"] for record in of))
    steps = sum(record["steps"] for record in of)
    accepted = sum(sum(record["reached"][1:]) for record in of)
    assert row["accepted"] == pytest.approx(accepted / steps) and row["tau"] == pytest.approx(1 + accepted / steps)
    assert row["draft_ms"] == pytest.approx(1e3 * sum(record["draft_s"] for record in of) / steps)
    assert row["drafted"] == pytest.approx(sum(record["drafted"] for record in of) / steps)
    assert row["prompts"] == 2


def test_speed_ups_are_paired_over_the_same_prompts(rows: dict[Any, Any], records: list[dict[str, Any]]) -> None:
    plain, suffix = (timed(records, "code", 0.0, method) for method in ("plain", "suffix"))
    wanted = sum(1 / record["p50"] for record in plain) / sum(1 / record["p50"] for record in suffix)
    value, low, high = rows["code", 0.0, "suffix"]["over_plain"]
    assert value == pytest.approx(wanted) and low <= value <= high
    each = [b["p50"] / a["p50"] for a, b in zip(plain, suffix, strict=True)]
    assert min(each) * 0.999 < low and high < max(each) * 1.001
    chains = {m: rows["code", 0.0, m]["tokens_per_s"] for m in ("chain:1-2", "chain:4")}
    fastest = max(chains, key=lambda name: chains[name])
    assert rows["code", 0.0, fastest]["over_chain"][:1] == (1.0,)


def test_trees_are_set_beside_the_chain_of_as_many_nodes(rows: dict[Any, Any]) -> None:
    row, chain = rows["code", 0.0, "dyspec:5"], rows["code", 0.0, "chain:4"]
    assert row["equal_nodes_with"] == "chain:4" and row["verified"] == chain["verified"] == 5
    assert row["equal_nodes"][0] == pytest.approx(row["tau"] / chain["tau"])
    assert rows["code", 0.0, "suffix"]["equal_nodes"] is None and chain["equal_nodes"] is None


def test_only_a_chain_of_about_as_many_nodes_or_calls_is_set_beside_a_tree(records: list[dict[str, Any]]) -> None:
    changed = json.loads(json.dumps(records))
    for record in timed(changed, "code", 0.0, "dyspec:5"):
        record |= {"verified": 6 * record["steps"], "draft_calls": 1.2 * record["steps"]}
    found = {(row["suite"], row["temperature"], row["method"]): row for row in summarise(changed)}
    row, chain = found["code", 0.0, "dyspec:5"], found["code", 0.0, "chain:1-2"]
    assert (row["equal_nodes"], row["equal_nodes_with"], row["equal_calls_with"]) == (None, None, "chain:1-2")
    assert row["equal_calls"][0] == pytest.approx(row["tau"] / chain["tau"])
    other = found["mt_bench", 0.0, "dyspec:5"]
    assert (other["equal_nodes_with"], other["equal_calls"], other["equal_calls_with"]) == ("chain:4", None, None)


def test_the_fastest_of_a_kind_is_found_whatever_its_depth_and_verifier() -> None:
    known = (
        ("chain:2", "ok", 3.0),
        ("chain:4@match", "ok", 5.0),
        ("chain:8", "failed", 9.0),
        ("suffix@match", "ok", 7.0),
    )
    rows = [dict(zip(("method", "status", "tokens_per_s"), row, strict=True)) for row in known]
    assert [best(rows, kind) for kind in ("chain", "suffix", "plain")] == [rows[1], rows[3], None]


def test_a_timed_output_that_is_wrong_takes_the_figures_away(records: list[dict[str, Any]]) -> None:
    wrong = json.loads(json.dumps(records))
    record = timed(wrong, "mt_bench", 0.0, "dyspec:5")[1]
    record |= {"lossless": False, "first_divergence": 3, "logit_gap": 0.5, "logit_scale": 2.0}
    found = {(row["suite"], row["temperature"], row["method"]): row for row in summarise(wrong)}
    row = found["mt_bench", 0.0, "dyspec:5"]
    assert row["status"] == "failed" and "tokens_per_s" not in row and row["logit_gap"] == 0.5
    assert found["code", 0.0, "dyspec:5"]["status"] == "ok"


def test_nothing_is_set_beside_what_has_no_figures(records: list[dict[str, Any]]) -> None:
    wrong = json.loads(json.dumps(records))
    for method in ("plain", "chain:4"):
        timed(wrong, "code", 0.0, method)[0]["lossless"] = False
    found = {(row["suite"], row["temperature"], row["method"]): row for row in summarise(wrong)}
    row, chain = found["code", 0.0, "dyspec:5"], found["code", 0.0, "chain:1-2"]
    assert found["code", 0.0, "chain:4"]["status"] == found["code", 0.0, "plain"]["status"] == "failed"
    assert (row["over_plain"], row["equal_nodes"]) == (None, None)
    assert row["over_chain"][0] == pytest.approx(row["tokens_per_s"] / chain["tokens_per_s"])


def test_a_sampled_method_is_called_what_the_test_of_its_law_says(records: list[dict[str, Any]]) -> None:
    tested = json.loads(json.dumps(records))
    notes = [r for r in tested if r["metric"] == "check" and r["provider"] == "dyspec:5"]
    (note,) = [r for r in notes if (r["params"]["suite"], r["params"]["temperature"]) == ("code", 0.8)]
    note |= {"lossless": True, "p_value": 0.25}
    found = {(row["suite"], row["temperature"], row["method"]): row for row in summarise(tested)}
    row, untested = found["code", 0.8, "dyspec:5"], found["mt_bench", 0.8, "dyspec:5"]
    assert row["lossless"] and verdict_text(row) == f"target's law, p = 0.25 ({row['verifier']})"
    assert verdict_text(untested) == f"greedy identical, law untested ({row['verifier']})"


def test_near_ties_are_counted_and_the_widest_is_told_in_parts_of_the_scale(records: list[dict[str, Any]]) -> None:
    tied = json.loads(json.dumps(records))
    for record, gap in zip(timed(tied, "mt_bench", 0.0, "dyspec:5"), (1e-4, -3e-4), strict=False):
        record |= {"lossless": True, "first_divergence": 3, "logit_gap": gap, "logit_scale": 2.0}
    found = {(row["suite"], row["temperature"], row["method"]): row for row in summarise(tied)}
    row = found["mt_bench", 0.0, "dyspec:5"]
    assert (row["lossless"], row["near_ties"], row["largest_gap"]) == (True, 2, pytest.approx(1.5e-4))


def test_the_interval_of_a_constant_ratio_is_that_ratio() -> None:
    base = [1.0, 2.0, 3.0, 4.0]
    assert interval(_times, base, [value / 2 for value in base]) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_holds_the_ratio_and_is_paired() -> None:
    base = [1.0, 10.0, 100.0, 1000.0]  # prompts differ far more than methods do
    value, low, high = interval(_times, base, [0.5, 6.0, 45.0, 550.0])
    assert low is not None and high is not None and 1.6 < low < value < high < 2.3


def test_the_interval_covers_what_it_should() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(60):
        base = rng.gamma(4.0, size=30)
        _, low, high = interval(_times, base.tolist(), (base / 1.3 * rng.lognormal(0.0, 0.2, 30)).tolist())
        assert low is not None and high is not None
        hits += low <= 1.3 / np.exp(0.02) <= high  # the mean of that lognormal is exp(0.02)
    assert hits >= 50  # 57 expected; 50 or fewer has a chance below 0.5 % at 95 % coverage


def test_one_prompt_gives_a_ratio_without_interval() -> None:
    assert interval(_times, [1.0], [2.0]) == (0.5, None, None)


def test_the_terminal_shows_verdicts_and_names_what_failed(written: tuple[Path, str]) -> None:
    text = written[1]
    assert "bench_run: code, temperature 0\n" in re.sub(" +\n", "\n", text)
    assert "mamba-ssm: cannot run: mamba-ssm needs a CUDA device" in text
    assert re.search(r"unrolled:static:2,2: FAILS: differs, logit gap \d", text)
    for verdict in (
        "identical (greedy)",
        "identical (match)",
        "the reference",
        "greedy identical, law untested",
    ):
        assert verdict in text, verdict
    assert "…" not in text  # no cell is cut


def test_memory_is_told_in_units_of_its_heading(rows: dict[Any, Any]) -> None:
    row = next(row for row in rows.values() if row["status"] == "ok")
    assert cells({**row, "state_bytes": 3072, "peak_mib": 7.4}).items() >= {"state_kib": "3", "peak_mib": "7"}.items()
    assert cells({**row, "state_bytes": None, "peak_mib": None}).items() >= {"state_kib": "-", "peak_mib": "-"}.items()


def test_the_csv_has_every_row_and_its_interval(written: tuple[Path, str], rows: dict[Any, Any]) -> None:
    with (written[0] / "report.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    (line,) = [x for x in lines if (x["suite"], x["temperature"], x["method"]) == ("code", "0.8", "suffix")]
    row = rows["code", 0.8, "suffix"]
    assert float(line["over_plain_low"]) == pytest.approx(row["over_plain"][1])
    assert float(line["tau"]) == pytest.approx(row["tau"]) and line["run"] == "bench_run"


def test_the_page_needs_nothing_else_and_shows_everything(written: tuple[Path, str]) -> None:
    page = (written[0] / "report.html").read_text()
    body = re.sub(r"<metadata>.*?</metadata>|xmlns(:\w+)?=\"[^\"]*\"", "", page, flags=re.DOTALL)
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)|https?://", body)
    assert page.count("<svg") == page.count("</svg>") == 2 * 4 + 2
    for text in (*METHODS, *HEADINGS.values(), "Acceptance by depth", "Time of verify and commit", "bits a token"):
        assert text.replace("'", "&#39;") in page, text
    assert '<meta name="viewport" content="width=device-width' in page and "@media print" in page
    assert "a processor" in page and "stree bench run" in page


def test_a_method_name_cannot_break_the_page(tmp_path: Path) -> None:
    lines = (RUN / "results.jsonl").read_text().replace("needs a CUDA device", "<script>alert(1)</script>")
    run = tmp_path / "bad"
    run.mkdir()
    (run / "results.jsonl").write_text(lines)
    (run / "run.json").write_text((RUN / "run.json").read_text())
    write_report(load_runs([run]), run, Console(quiet=True))
    assert "<script" not in (run / "report.html").read_text()


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("results.jsonl", "run.json"):
        (other / name).write_text((RUN / name).read_text())
    write_report(load_runs([RUN, other]), tmp_path, Console(quiet=True))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 20
    assert page.index("bench_run: code, temperature 0") < page.index("other: code") < page.index("bench_run: mt_bench")
    with pytest.raises(ValueError, match="every directory needs a name of its own, got other, other"):
        load_runs([other, other])


def test_markdown_shows_the_fastest_of_a_kind_and_what_failed() -> None:
    lines = {}
    for every in (False, True):
        console = Console(width=80)
        with console.capture() as capture:
            print_markdown(load_runs([RUN]), console, every=every)
        lines[every] = capture.get().splitlines()
    assert lines[False][0].startswith("| suite | T | method | tokens/s | over plain [95%] |")
    assert len({line.count("|") for line in lines[False]}) == 1
    methods = [line.split(" | ")[2] for line in lines[False] if line.startswith("| code | 0 |")]
    assert methods == ["plain", "transformers", "chain:1-2", "dyspec:5", "unrolled:static:2,2", "suffix"]
    assert len(lines[True]) == 2 + 4 * len(METHODS)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"holds no run: there is no run\.json in it"),
        ({"run.json": "{"}, r"run\.json cannot be read"),
        ({"run.json": '{"config": {}, "sessions": []}'}, "holds no results yet"),
    ],
)
def test_a_directory_without_a_run_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_runs([tmp_path])


@pytest.mark.parametrize("change", [{"p50": 0.0}, {"steps": None}, {"params": {}}], ids=["speed", "steps", "params"])
def test_a_damaged_record_is_refused(change: dict[str, Any], records: list[dict[str, Any]], tmp_path: Path) -> None:
    timed: dict[str, Any] = next(record for record in records if record["metric"] == "tokens_per_s")
    (tmp_path / "run.json").write_text('{"config": {}, "sessions": []}', encoding="utf-8")
    (tmp_path / "results.jsonl").write_text(json.dumps(timed | change) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"{tmp_path} holds a record that this version cannot read"):
        load_runs([tmp_path])


def test_tau_counts_for_every_text_only_the_steps_that_it_took_part_in() -> None:
    """The second text of a batch of two ends after one step of the ten; a batch of one takes two steps."""
    params = {"engine": "tree", "drafter": "model", "growth": "Chain(3)", "suite": "s", "temperature": 0.0, "turn": 0}
    known = {"metric": "tokens_per_s", "provider": "chain:3", "p50": 1.0, "lossless": True, "verifier": "greedy"}
    blocks = []
    for batch, (texts, steps, reached) in enumerate([(2, 10, [11, 4, 3]), (1, 2, [2, 2, 2, 2])]):
        counts = Counts(drafted=3 * reached[0], reached=Counter(dict(enumerate(reached))))
        stats = {"steps": steps, "tau": sum(reached) / reached[0], "nodes_per_step": 4.0, "draft_calls": 3 * steps}
        runs = 2 * [Run([[1]] * texts, 1.0, None, stats, counts, None, None)]
        blocks.append({"params": params | {"batch": batch, "prompts": [*range(texts)]}, **known} | make_record(runs))
    (row,) = summarise(blocks)
    assert row["tau"] == pytest.approx((11 + 4 + 3 + 8) / 13)
    assert (row["drafted"], row["verified"], row["draft_calls"]) == (3.0, 4.0, 3.0)
    ratio, *_ = _more_tokens({(1, 0): blocks[1], (0, 0): blocks[1]}, {(0, 0): blocks[0], (1, 0): blocks[1]}) or (0.0,)
    assert ratio == pytest.approx(row["tau"] / 4)
    both, second = {(0, 0): blocks[0], (1, 0): blocks[1]}, {(1, 0): blocks[1]}
    assert _more_tokens(second, both) == _more_tokens(both, second) == (1.0, None, None)


def test_memory_is_the_most_of_all_runs_and_counts_are_their_sums() -> None:
    def run(steps: int, peak: float | None, size: int, first: float) -> Run:
        stats = {"steps": steps, "tau": 1.0, "nodes_per_step": 4.0, "draft_calls": steps, "verify_s": 0.5}
        return Run([[1]], 1.0, first, stats, Counts(reached=Counter({0: steps})), peak, size)

    record = make_record([run(2, 7.0, 100, 0.1), run(3, None, 400, 0.2), run(1, 9.0, 200, 0.3), run(1, 8.0, 100, 0.6)])
    assert (record["peak_mib"], record["state_bytes"], record["ttft_s"]) == (9.0, 400, pytest.approx(0.3))
    assert (record["steps"], record["draft_calls"], record["verified"], record["verify_s"]) == (7, 7, 28.0, 2.0)


def test_batches_weigh_as_much_as_their_prompts_and_turns_of_one_count_as_one() -> None:
    def block(batch: int, turn: int, prompts: int, tokens_per_s: float) -> dict[str, Any]:
        return {"params": {"batch": batch, "turn": turn, "prompts": [*range(prompts)]}, "p50": tokens_per_s}

    plain = {(0, 0): block(0, 0, 4, 100.0), (1, 0): block(1, 0, 1, 25.0)}
    other = {(0, 0): block(0, 0, 4, 200.0), (1, 0): block(1, 0, 1, 25.0)}
    value, *_ = _speedup(plain, other) or (0.0,)
    assert value == pytest.approx((4 / 100 + 1 / 25) / (4 / 200 + 1 / 25))
    assert _speedup(plain, {(1, 0): block(1, 0, 1, 50.0)}) == (2.0, None, None), "of what both have run"
    assert _speedup({(1, 0): block(1, 0, 1, 50.0)}, plain) == (0.5, None, None) and _speedup(plain, {}) is None
    turns = {(0, turn): block(0, turn, 1, 100.0 + turn) for turn in range(6)}
    assert _speedup(turns, turns) == (1.0, None, None), "one conversation says nothing of how others differ"
