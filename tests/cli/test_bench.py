"""``stree bench`` from the command line, on a tiny pair saved to disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.tiny_models import VOCAB
from helpers.tiny_pairs import save_tiny

from stree.bench.records import ROOT
from stree.cli import main
from stree.distill.heads import HEADS
from stree.models.tree_lm import TreeLM
from stree.vocabulary import save_vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter and a suite."""
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "target")
    save_tiny(folder / "drafter", seed=1)
    lines = [json.dumps({"prompt": text}) for text in ("w1 w2 w3 w1", "w4 w5", "w6 w7 w8")]
    (folder / "p.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def bench(folder: Path, out: Path, *options: str) -> int:
    """Run ``stree bench run`` with a few tokens."""
    models = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    few = ["--max-new-tokens", "4", "--limit", "2", "--methods", "plain,chain:2"]
    suite = ["--suite", f"mine={folder / 'p.jsonl'}"]
    return main(["bench", "run", *models, *few, *suite, "--out", str(out), *options])


def test_a_run_writes_records_and_a_page_and_reports_what_it_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert bench(folder, run, "--json", "--steps") == 0
    assert {path.name for path in run.iterdir()} == {"run.json", "results.jsonl", "report.html"}
    out = capsys.readouterr().out
    assert "identical (greedy)" in out
    last = json.loads(out.splitlines()[-1])
    assert [row["method"] for row in last["rows"]] == ["plain", "chain:2"] and last["rows"][1]["tau"] >= 1
    about = json.loads((run / "run.json").read_text())
    assert about["config"]["methods"] == ["plain (auto)", "chain:2 (auto)"] and about["config"]["max_new_tokens"] == 4
    records = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    timed = [record for record in records if record["metric"] == "tokens_per_s"]
    assert len(timed) == 2 * 2 and all(record["lossless"] for record in timed)
    names = ("p50", "ttft_s", "tau", "steps", "verify_s")
    assert all(record[name] > 0 for record in timed for name in names)
    for record in timed:
        (steps,), (row,) = record["step_records"], record["rows"]
        assert row["tau"] == record["tau"] == sum(len(step["path"]) for step in steps) / len(steps)
    page = (ROOT / "docs" / "bench.md").read_text()
    fields = {name for record in timed for name in (*record, *record["params"])} - {"metric", "provider", "env"}
    assert not [name for name in fields if f"`{name}`" not in page], "every field of a record is documented"
    assert main(["bench", "report", str(run), "--markdown"]) == 0
    *table, empty, note = capsys.readouterr().out.splitlines()
    assert len(table) == 4 and table[0].startswith("| suite")
    assert not empty and note.startswith("Intervals need at least 3 prompts")
    assert main(["bench", "report", str(run), "--markdown", "--out", str(tmp_path / "x")]) == 2
    assert "--markdown only prints a table" in capsys.readouterr().err
    assert main(["bench", "report", str(run), "--out", str(tmp_path / "x")]) == 0
    assert (tmp_path / "x" / "report.html").exists()


def test_a_draft_head_is_measured_like_a_draft_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HEADS["mtp"](TreeLM.from_pretrained(folder / "target"), 0).save(folder / "head")
    assert bench(folder, tmp_path / "run", "--drafter", str(folder / "head"), "--temperature", "0,0.8", "--json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all(2 <= row["draft_calls"] <= 3 for row in rows if row["method"] == "chain:2")
    assert main(["bench", "profile", "--target", str(folder / "target"), "--drafter", str(folder / "head")]) == 2
    assert "times draft models, not draft heads" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["target", "head"])
def test_a_trimmed_drafter_drafts_kept_tokens_only_and_its_tokens_are_part_of_the_configuration(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "head":
        HEADS["mtp"](TreeLM.from_pretrained(folder / "target"), 0).save(folder / "head")
    file = tmp_path / "kept.json"
    options = ["--drafter", str(folder / kind), "--methods", "plain,static:8", "--max-new-tokens", "12", "--json"]
    trimmed = [*options, "--drafter-vocab", str(file)]

    def tau(run: str, options: list[str]) -> float:
        assert bench(folder, tmp_path / run, *options) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
        assert all(row["lossless"] for row in rows)
        return float(rows[1]["tau"])

    save_vocabulary(file, [0], VOCAB)  # the stop token, which the target's texts do not hold
    assert tau("whole", options) > 1 and tau("trimmed", trimmed) == 1
    config = json.loads((tmp_path / "trimmed" / "run.json").read_text())["config"]
    assert config["drafter_vocab"]["tokens"] == 1
    save_vocabulary(file, list(range(VOCAB)), VOCAB)
    assert bench(folder, tmp_path / "trimmed", *trimmed) == 2 and "with drafter_vocab" in capsys.readouterr().err
    assert tau("all", trimmed) > 1


def test_a_trimmed_vocabulary_that_does_not_fit_is_refused_before_anything_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_vocabulary(tmp_path / "small.json", [0, 1], 50)
    save_vocabulary(tmp_path / "endless.json", [1, 2], VOCAB)
    for file, drafter, message in (
        ("nowhere", "drafter", "no trimmed vocabulary can be read"),
        ("small.json", "drafter", f"is of 50 tokens, the drafter has {VOCAB}"),
        ("endless.json", "drafter", "leaves out the target's stop tokens [0]"),
        ("endless.json", "none", "--drafter-vocab trims a draft model; there is none"),
    ):
        name = "none" if drafter == "none" else str(folder / drafter)
        options = ["--drafter", name, "--drafter-vocab", str(tmp_path / file)]
        assert bench(folder, tmp_path / "run", *options) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_run_is_not_resumed_with_another_tokenizer_or_other_methods_of_one_s_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1 w2 w3"}\n')
    (tmp_path / "own.py").write_text("")
    save_tiny(tmp_path / "target")
    options = ["--drafter", "none", "--methods", "plain", "--import", str(tmp_path / "own.py")]
    assert bench(tmp_path, tmp_path / "run", *options) == bench(tmp_path, tmp_path / "run", *options) == 0
    (tmp_path / "own.py").write_text("# changed")
    assert bench(tmp_path, tmp_path / "run", *options) == 2 and "with import [" in capsys.readouterr().err
    (tmp_path / "own.py").write_text("")
    save_tiny(tmp_path / "target", words=[f"w{number}" for number in range(96, 0, -1)])
    assert bench(tmp_path, tmp_path / "run", *options) == 2 and "with prompt_tokens '" in capsys.readouterr().err


def test_ctrl_c_says_how_to_go_on_and_ends_with_status_130(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stree.bench.runner.Runner.run", interrupted)
    assert bench(folder, tmp_path / "run") == 130
    assert "what is finished is kept in" in capsys.readouterr().err


def test_a_profile_is_printed_and_appended(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--context", "8", "--max-new-tokens", "6", "--budget", "4", "--out", str(tmp_path / "profile.jsonl")]
    assert main(["bench", "profile", "--target", str(folder / "target"), *few, "--json"]) == 0
    out = capsys.readouterr().out
    assert "whole step" in out and json.loads(out.splitlines()[-1]) == json.loads(
        (tmp_path / "profile.jsonl").read_text()
    )


def test_kernel_benches_are_those_of_the_gpu_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []  # test_suite.py runs the suite itself

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["bench", "kernels", "--smoke", "--out", str(tmp_path)]) == 3
    assert commands[0][1:] == ["-m", "benchmarks.gpu.suite", "--out", str(tmp_path), "--smoke"]


@pytest.mark.parametrize("package", ["scipy.stats", "matplotlib"])
def test_a_missing_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("summary", "report", "plots", "drawing"):
        monkeypatch.delitem(sys.modules, f"stree.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["bench", "report", "x"]) == 2
    assert "install stree[bench]" in capsys.readouterr().err
