"""``stree bench`` from the command line, on a tiny pair saved to disk."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.tiny_pairs import save_tiny

from stree.bench import directory, kernels, runner
from stree.bench.execute import Case, Run, execute
from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.cli import main
from stree.files import alone_in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter and a suite."""
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "target")
    save_tiny(folder / "drafter", seed=1)
    lines = [json.dumps({"prompt": text}) for text in ("w1 w2 w3 w1", "w4 w5", "w6 w7 w8")]
    (folder / "p.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"nothing": 1}\n')
    return folder


def bench(folder: Path, out: Path, *options: str) -> int:
    """Run ``stree bench run`` with a few tokens."""
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    few = ["--max-new-tokens", "4", "--limit", "2", "--nodes", "3", "--rounds", "1", "--methods", "plain,chain:2"]
    suite = ["--suite", f"mine={folder / 'p.jsonl'}"]
    return main(["bench", "run", *models, *few, *suite, "--out", str(out), *options])


def test_a_run_writes_every_artefact_and_reports_what_it_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, tmp_path / "run", "--json") == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "run.json", "results.jsonl", "report.csv", "report.html"
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "run: mine, temperature 0" in out and "identical (greedy)" in out
    last = json.loads(out.splitlines()[-1])
    assert [row["method"] for row in last["rows"]] == ["plain", "chain:2"] and last["rows"][1]["tau"] >= 1
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["config"]["methods"] == ["plain (auto)", "chain:2 (auto)"] and about["config"]["max_new_tokens"] == 4
    (session,) = about["sessions"]
    assert {"device", "threads", "mhz", "torch", "transformers", "commit", "command", "date"} <= set(session)
    records = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    timed = [record for record in records if record["metric"] == "tokens_per_s"]
    assert len(timed) == 2 * 2 and all(record["lossless"] for record in timed)
    assert all(record["ttft_s"] > 0 and record["state_bytes"] > 0 and record["p50"] > 0 for record in timed)
    assert all(record["kl_bits"] > 0 for record in timed if record["provider"] == "plain")
    assert {record["provider"] for record in records if record["metric"] == "step_latency"} == {
        "tree", "unrolled", "snapshot"
    }  # fmt: skip
    assert main(["bench", "report", str(tmp_path / "run"), "--markdown", "--all"]) == 0
    assert re.search(r"\| mine \| 0 \| chain:2 \| \d+ \|.*\| identical \(greedy\) \|\n", capsys.readouterr().out)
    for options, message in (
        (["--markdown", "--json"], "--markdown only prints a table; leave --out and --json out"),
        (["--markdown", "--out", str(tmp_path / "x")], "--markdown only prints a table"),
        (["--all"], "--all is for --markdown"),
    ):
        assert main(["bench", "report", str(tmp_path / "run"), *options]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_step_costs_that_are_not_on_record_are_measured(folder: Path, tmp_path: Path) -> None:
    results, found = tmp_path / "run" / "results.jsonl", []
    for nodes in ("3", "3", "2,3,2", "3,2"):
        assert bench(folder, tmp_path / "run", "--nodes", nodes) == 0
        lines = results.read_text().splitlines(keepends=True)
        records = [record for record in map(json.loads, lines) if record["metric"] in ("step_latency", "sizes")]
        found.append([(record["provider"], record["params"]["nodes"]) for record in records])
        if nodes == "2,3,2":
            results.write_text("".join(lines[:-1]))  # cut off while they were written
    one = ["tree", "unrolled", "snapshot", "sizes"]
    three, two = ([(provider, nodes) for provider in one] for nodes in (3, 2))
    assert found == [three, three, three + two, three + two]


def test_another_configuration_needs_force(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, tmp_path / "run", "--nodes", "") == 0
    assert bench(folder, tmp_path / "run", "--nodes", "", "--max-new-tokens", "5") == 2
    assert "holds a run with max_new_tokens 4, not 5; choose another --out, or --force" in capsys.readouterr().err
    assert bench(folder, tmp_path / "run", "--nodes", "", "--max-new-tokens", "5", "--force") == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "results.jsonl").read_text().splitlines()]
    assert {len(record["tokens"][0][0]) for record in records if record["metric"] == "tokens_per_s"} == {5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "mine=no-such-file"], "suite 'mine': there is no file 'no-such-file'"),
        (["--suite", "mine"], "a suite must be NAME=FILE, got 'mine'"),
        (["--suite", "mine=FOLDER/empty.jsonl"], "suite 'mine': empty.jsonl holds no prompts"),
        (["--suite", "mine=FOLDER/bad.jsonl"], "suite 'mine': line 2 of bad.jsonl: a record needs one of the fields"),
        (["--methods", ""], "method '' is unknown: Known are plain"),
        (["--methods", "plain,chian:4"], "method 'chian:4' is unknown: did you mean chain"),
        (["--methods", "plain,dyspec:0"], "method 'dyspec:0' cannot run: budget must be at least 1, got 0"),
        (["--methods", "plain,stree:5"], "method 'stree:5' cannot run: a tree of 13 nodes (root included) exceeds"),
        (["--temperature", "hot"], "--temperature must be a number or several, as 0,0.8, got 'hot'"),
        (["--temperature", "-1"], "temperatures must be in [0, 100), got [-1.0]"),
        (["--max-new-tokens", "1"], "max_new_tokens must be at least 2, got 1"),
        (["--limit", "-1"], "--limit and --rounds must be positive, got -1"),
        (["--nodes", "3,x"], "--nodes must be positive numbers, as 8,16, got '3,x'"),
        (["--threads", "-1"], "--threads must not be negative, got -1"),
        (["--chat"], "--chat needs a tokenizer with a chat template"),
        (["--target", "no/such/folder"], "no checkpoint that transformers can read at 'no/such/folder'"),
    ],
)
def test_bad_input_is_named_and_ends_with_status_two(
    folder: Path, tmp_path: Path, options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, tmp_path / "run", *(option.replace("FOLDER", str(folder)) for option in options)) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("run/*"))


def test_two_runs_into_one_directory_at_once_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone_in(tmp_path / "run"):
        assert bench(folder, tmp_path / "run", "--nodes", "") == 2
        assert f"another run writes into {tmp_path / 'run'}; wait for its end" in capsys.readouterr().err
        assert not list(tmp_path.glob("run/*"))
    assert bench(folder, tmp_path / "run", "--nodes", "") == 0


def test_ctrl_c_says_how_to_go_on_and_ends_with_status_130(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = iter(range(10))

    def interrupted(pair: Pair, method: Method, case: Case) -> Run:
        if next(count) == 2:  # the first prompt is finished
            raise KeyboardInterrupt
        return execute(pair, method, case)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", interrupted)
        assert bench(folder, tmp_path / "run", "--nodes", "") == 130
    assert "what is finished is kept in" in capsys.readouterr().err
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["metric"] == "tokens_per_s" for line in lines) == 2
    assert bench(folder, tmp_path / "run", "--nodes", "") == 0
    whole = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert whole[: len(lines)] == lines
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]) == 2


def test_a_full_disk_ends_with_a_message(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, records: Sequence[Record]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory, "append", full)
    assert bench(folder, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and "what is finished is kept in" in error


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "stree.bench.plots", raising=False)
    monkeypatch.delitem(sys.modules, "stree.bench.page", raising=False)
    monkeypatch.delitem(sys.modules, "stree.bench.report", raising=False)
    assert main(["bench", "report", "x"]) == 2
    assert "install stree[bench]" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile"])
def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", command, "--target", "no/such/folder", "--out", str(tmp_path)]) == 2
    assert f"--out must be a file, got the folder {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["profile", "run"])
@pytest.mark.parametrize("below", ["", "deeper/"])
def test_a_file_in_place_of_a_folder_is_named_before_anything_is_measured(
    command: str, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("mine", encoding="utf-8")
    (tmp_path / "text.txt").write_text("A text.", encoding="utf-8")
    own = ["--suite", f"t={tmp_path / 'text.txt'}", "--limit", "1"] if command == "run" else []
    out = tmp_path / "taken" / below if command == "run" else tmp_path / "taken" / below / "file.json"
    assert main(["bench", command, *own, "--out", str(out)]) == 2
    folder = out if command == "run" else out.parent
    assert f"a folder is needed at {folder}, but {tmp_path / 'taken'} is a file" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text(encoding="utf-8") == "mine"


def test_kernel_benches_run_and_their_records_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", "reference", "--smoke", "--out", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert {record["params"]["n"] for record in records} == {1, 5} and all(r["p50"] > 0 for r in records)
    assert "ssd_step" in capsys.readouterr().out
    assert main(["bench", "kernels", "magic"]) == 2
    assert "kernel bench 'magic' is unknown; known are reference, suite" in capsys.readouterr().err
    monkeypatch.setattr(kernels, "FOLDER", tmp_path)
    assert main(["bench", "kernels", "reference"]) == 2
    assert "run from a checkout of the repository: there is no bench_reference.py here" in capsys.readouterr().err
    (tmp_path / "bench_reference.py").write_text("raise SystemExit('broken')")
    assert main(["bench", "kernels", "reference"]) == 2
    assert "bench_reference.py ended with status 1: broken" in capsys.readouterr().err
