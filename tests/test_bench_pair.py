"""The benchmark of the pair: prompt files, methods, resuming, intervals, and the table from a canned results file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_methods
import bench_pair
import bench_prompts
import bench_records
import bench_table
from bench_methods import Run
from bench_pair import Block, Settings

SETTINGS = Settings(max_new_tokens=5, repeats=1, dtype="float32", threads=2)


def record(method: str, index: int, speed: float, tau: float = 1.0, temperature: float = 0.0) -> dict[str, Any]:
    """Write down a run of five tokens at ``speed`` tokens a second."""
    (parsed,) = bench_methods.parse_methods(method)
    steps = 4
    stats: dict[str, Any] = {
        "steps": steps,
        "tau": tau,
        "nodes_per_step": 3.0,
        "draft_calls": 8,
        "draft_s": 0.4,
        "verify_s": 0.2,
    }
    stats |= {"accept_s": 0.0, "commit_s": 0.04, "acceptance_by_depth": [0.5, 0.5]}
    runs = [Run([1, 2, 3, 4, 5], 5 / speed, stats)]
    block = Block("humaneval", index, temperature)
    return bench_pair.make_record(block, parsed, runs, {"lossless": True, "identical": True}, SETTINGS, {"cpu": "x"})


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"task_id": "HumanEval/0", "prompt": "def f():"}, "def f():"),
        ({"question": "How many?", "answer": "3"}, "Question: How many?\nAnswer:"),
        ({"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."]}, "Compose."),
        ({"text": "plain"}, "plain"),
    ],
    ids=["humaneval", "gsm8k", "mt-bench", "text"],
)
def test_a_prompt_is_read_from_every_format(tmp_path: Path, fields: dict[str, Any], prompt: str) -> None:
    assert bench_prompts.read_prompts(write_lines(tmp_path / "suite.jsonl", fields)) == [prompt]


def test_a_text_file_holds_a_prompt_a_paragraph_and_the_limit_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\nline two\n\n\ntwo\n\nthree\n", encoding="utf-8")
    assert bench_prompts.read_prompts(path, 2) == ["one\nline two", "two"]


def test_a_record_without_a_known_field_names_the_fields(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt, question, turns, text, got other"):
        bench_prompts.read_prompts(write_lines(tmp_path / "suite.jsonl", {"other": 1}))


@pytest.mark.parametrize(
    ("text", "message"),
    [("FILE", "NAME=FILE"), ("a=FILE,a=FILE", "given twice"), ("a=FILE-that-is-not", "there is no file")],
)
def test_a_bad_suite_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write_lines(tmp_path / "suite.jsonl", {"text": "x"})
    with pytest.raises(ValueError, match=message):
        bench_prompts.parse_suites(text.replace("FILE", str(path)))


def test_methods_are_read_with_ranges_shapes_and_budgets() -> None:
    text = "plain,transformers,chain:2-4,static:3,2,static:stree,dyspec:16,dyspec:32x4,dyspec-heap:8,suffix:8"
    found = {method.name: (method.drafter, method.budget) for method in bench_methods.parse_methods(text)}
    assert found == {
        "plain": ("none", 1), "transformers": ("transformers", 1),
        "chain:2": ("model", 3), "chain:3": ("model", 4), "chain:4": ("model", 5),
        "static:3,2": ("model", 10), "static:stree": ("model", 13),
        "dyspec:16": ("model", 16), "dyspec:32x4": ("model", 32), "dyspec-heap:8": ("model", 8),
        "suffix:8": ("suffix", 8),
    }  # fmt: skip


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'magic:3' is unknown; use plain, transformers, chain:DEPTH"):
        bench_methods.parse_methods("plain,magic:3")


@pytest.mark.parametrize(
    ("method", "temperature", "verifier"),
    [
        ("plain", 0.0, "greedy"),
        ("suffix:8", 0.8, "match"),
        ("chain:2", 0.8, "traversal"),
        ("transformers", 0.8, "none"),
    ],
)
def test_a_record_says_which_verifier_auto_means(method: str, temperature: float, verifier: str) -> None:
    assert record(method, 0, 10.0, temperature=temperature)["verifier"] == verifier


def test_distinct_4grams_counts_repetition() -> None:
    assert bench_pair.distinct_4grams([1, 2, 3, 4, 5, 6]) == 1.0
    assert bench_pair.distinct_4grams([1, 1, 1, 1, 1, 1]) == pytest.approx(1 / 3)
    assert bench_pair.distinct_4grams([1, 2]) == 1.0


def test_the_interval_of_a_constant_ratio_is_that_ratio() -> None:
    base = [1.0, 2.0, 3.0, 4.0]
    assert bench_table.interval(base, [value / 2 for value in base]) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_holds_the_ratio_and_is_paired() -> None:
    base = [1.0, 10.0, 100.0, 1000.0]  # prompts differ far more than methods do
    value, low, high = bench_table.interval(base, [0.5, 6.0, 45.0, 550.0]) or (0.0, 0.0, 0.0)
    assert low < value < high
    assert low > 1.6 and high < 2.3


def test_one_prompt_gives_no_interval() -> None:
    assert bench_table.interval([1.0], [2.0]) is None


def test_only_blocks_with_a_missing_method_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "results.jsonl"
    bench_records.append(path, [record("plain", 0, 10.0), record("chain:2", 0, 10.0), record("plain", 1, 10.0)])
    blocks = [Block("humaneval", index, 0.0) for index in range(3)]
    assert bench_pair.pending_blocks(blocks, ["plain", "chain:2"], bench_records.read(path)) == blocks[1:]
    assert bench_pair.pending_blocks(blocks, ["plain"], bench_records.read(path)) == blocks[2:]


def test_a_method_that_failed_its_check_is_not_waited_for() -> None:
    params = {"suite": "humaneval", "max_new_tokens": 5}
    failed = {"provider": "chain:2", "metric": "lossless", "lossless": False, "params": params}
    blocks = [Block("humaneval", 0, 0.0)]
    assert bench_pair.pending_blocks(blocks, ["plain", "chain:2"], [record("plain", 0, 10.0), failed]) == []
    passed = {**failed, "lossless": True}
    assert bench_pair.pending_blocks(blocks, ["plain", "chain:2"], [record("plain", 0, 10.0), failed, passed]) == blocks


def test_results_of_other_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens=5, this run 64; choose another --out"):
        bench_pair.check_settings([record("plain", 0, 10.0)], Settings(64, 1, "float32", 2))
    bench_pair.check_settings([record("plain", 0, 10.0)], SETTINGS)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"bench": "pair"}\n{"bench": \n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of results\.jsonl"):
        bench_records.read(path)


@pytest.fixture
def canned(tmp_path: Path) -> Path:
    """Results of five methods on two prompts, one of which failed its check."""
    lines = []
    for index in range(2):
        lines += [record("plain", index, 100.0), record("transformers", index, 101.0)]
        lines += [record("chain:2", index, 120.0, tau=1.5), record("chain:3", index, 150.0, tau=1.8)]
        lines += [record("dyspec:16", index, 180.0, tau=2.5)]
    failed = {"lossless": False, "logit_gap": 0.25, "metric": "lossless"}
    lines.append({**record("suffix:8", 0, 1.0), **failed})
    bench_records.append(tmp_path / "results.jsonl", lines)
    return tmp_path


def test_rows_sum_over_prompts(canned: Path) -> None:
    rows = {row["method"]: row for row in bench_table.summarise(bench_records.read(canned / "results.jsonl"))}
    row = rows["dyspec:16"]
    assert row["tokens_per_s"] == pytest.approx(180.0)
    assert row["tau"] == pytest.approx(2.5)
    assert row["draft_calls_per_step"] == 2.0
    assert row["draft_ms"] == pytest.approx(100.0)
    assert row["acceptance_by_depth"] == [0.5, 0.5]
    assert row["over_plain"] == pytest.approx((1.8, 1.8, 1.8))
    assert row["over_chain"] == pytest.approx((1.2, 1.2, 1.2))  # chain:3 is the faster chain
    assert "tau" not in rows["suffix:8"]


def test_the_bars_are_held_against_the_figures(canned: Path) -> None:
    bars = bench_table.bars(bench_table.summarise(bench_records.read(canned / "results.jsonl")))
    assert {name: met for name, (_, met) in bars.items()} == {
        "humaneval: cost of budget 1 over transformers (<= 1.05)": True,
        "humaneval: dyspec:16 over chain:3 in tokens/s (>= 1.0)": True,
        "humaneval: tau of dyspec:16 over chain:2, equal draft calls (> 1)": True,
        "humaneval: dyspec:16 over plain (>= 1.3)": True,
    }


def test_markdown_shows_the_fastest_of_a_kind_and_what_failed(canned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_pair.main(["--markdown", "--out", str(canned)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| suite | T | method | tau |")
    methods = [line.split(" | ")[2] for line in lines[2:]]
    assert methods == ["plain", "transformers", "chain:3", "dyspec:16", "suffix:8"]
    assert "| 1.80 [1.80, 1.80] | 1.20 [1.20, 1.20] | 0.50 0.50 | yes (greedy) |" in lines[5]
    assert "not timed: output differs" in lines[6] and "NO (gap 0.25)" in lines[6]
    assert len({line.count("|") for line in lines}) == 1
