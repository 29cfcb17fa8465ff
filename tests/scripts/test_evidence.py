"""The evidence: its table of parts is valid, finished commands are not run again, and drawn rows are compared.

Run: python -m pytest tests/scripts/test_evidence.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.drawn_plots import record

from benchmarks.evidence import __main__ as program
from benchmarks.evidence import draw, running
from benchmarks.evidence.parts import PARTS, Part
from benchmarks.evidence.running import Evidence, option
from stree.bench.methods import parse_methods
from stree.bench.records import ROOT
from stree.cli.bench import add_bench
from stree.cli.distill import add_distill
from stree.cli.trim_vocab import add_trim_vocab

COMMAND = """
import sys
from pathlib import Path
name, status, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[4])
with Path(sys.argv[0]).with_name("log").open("a") as log:
    log.write(name + " ")
out.mkdir(parents=True, exist_ok=True)
sys.exit(status)
"""
SLEEPER = """
import sys, time
from pathlib import Path
place = Path(sys.argv[1])
try:
    (place / "started").touch()
    time.sleep(60)
except KeyboardInterrupt:
    (place / "interrupted").touch()
"""
BENCH = (
    "stree bench run --limit 3 --temperature 0,0.8 --methods plain,chain:4,suffix "
    "--suite a={data}/a.jsonl,b={data}/b.jsonl --out {out}/run"
)


def test_parts_have_names_times_and_commands_that_the_programs_take() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert all(part.minutes <= 30 for part in PARTS) and sum(part.minutes for part in PARTS) <= 120
    commands = list(dict.fromkeys(command for part in PARTS for command in part.commands))
    outs = [option(command, "--out") for command in commands]
    assert len(set(outs)) == len(outs), "no command writes into another's folder"
    parser = argparse.ArgumentParser()
    known = parser.add_subparsers()
    add_bench(known)
    add_distill(known)
    add_trim_vocab(known)
    for command in commands:
        words = command.format(data="d", out="o", work="w", smollm2="s").split()
        if words[0] == "stree":
            arguments = parser.parse_args(words[1:])
            assert words[1] != "bench" or parse_methods(arguments.methods)[0].name == "plain"
        else:
            assert words[:2] == ["python", "-m"] and Path(words[2].replace(".", "/") + ".py").is_file()


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """Folders with data."""
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    found = Evidence(tmp_path / "data", tmp_path / "out", tmp_path / "work")
    found.prepare()
    return found


def part_of(tmp_path: Path, name: str, *statuses: int) -> Part:
    """Make a part of commands that note that they ran."""
    script = tmp_path / "command.py"
    script.write_text(COMMAND)
    commands = (f"python {script} {name}{i} {status} --out {{out}}/{name}{i}" for i, status in enumerate(statuses))
    return Part(name, 2.0, "something", tuple(commands))


def ran(tmp_path: Path) -> str:
    """Read which commands have run since the last call."""
    log = tmp_path / "log"
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return text.strip()


def test_finished_commands_are_skipped_and_the_others_run_again(tmp_path: Path, evidence: Evidence) -> None:
    parts = [part_of(tmp_path, "a", 0, 3, 0), part_of(tmp_path, "b", 0, 0)]
    assert evidence.run(parts) == 1
    assert ran(tmp_path) == "a0 a1 b0 b1", "a part stops at a command that fails, the next part runs"
    assert [evidence.is_finished(part) for part in parts] == [False, True]
    mended = [part_of(tmp_path, "a", 0, 0, 0), parts[1]]
    assert evidence.run(mended) == 0 and ran(tmp_path) == "a1 a2"
    assert evidence.run(mended) == 0 and ran(tmp_path) == ""
    (tmp_path / "out" / "b1").rmdir()
    assert evidence.run(mended) == 0 and ran(tmp_path) == "b1", "its output was taken away"


def test_what_was_made_on_the_way_is_made_again_only_for_records_that_are_missing(
    tmp_path: Path, evidence: Evidence
) -> None:
    part = part_of(tmp_path, "a", 0, 0)
    first = part.commands[0].replace("{out}", "{work}")
    part = replace(part, commands=(first, part.commands[1]))
    assert evidence.run([part]) == 0 and ran(tmp_path) == "a0 a1"
    (tmp_path / "work" / "a0").rmdir()
    assert evidence.run([part]) == 0 and ran(tmp_path) == ""
    (tmp_path / "out" / "a1").rmdir()
    assert evidence.run([part]) == 0 and ran(tmp_path) == "a0 a1"


@pytest.mark.slow
def test_an_interrupt_ends_the_command_and_only_then_the_program(tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    words = [sys.executable, str(script), str(tmp_path)]
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job ignores it
    code += f"from benchmarks.evidence.running import execute; execute({words})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert (tmp_path / "interrupted").exists()


def test_a_busy_machine_and_unknown_parts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.setattr(program, "PARTS", (part_of(tmp_path, "a", 0),))
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    folders = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert program.main(folders) == 1 and "got 1.50" in capsys.readouterr().err
    assert program.main([*folders, "--only", "b"]) == 1 and "must be of a, got b" in capsys.readouterr().err
    assert program.main([*folders, "--list"]) == 0 and "2 min" in capsys.readouterr().out
    assert ran(tmp_path) == ""
    assert program.main([*folders, "--force"]) == 0 and ran(tmp_path) == "a0"
    assert program.main([*folders, "--list"]) == 0 and "finished" in capsys.readouterr().out


def write_run(folder: Path, factor: float, suites: str = "ab", temperatures: Sequence[float] = (0.0, 0.8)) -> None:
    """Write a run in which suffix is about ``factor`` times as fast as plain decoding, other methods equally fast."""
    folder.mkdir(parents=True, exist_ok=True)
    speeds = {"plain": 1.0, "chain:4": 1.0, "suffix": factor}
    lines = [
        record(suite, batch, method, 20 / speed / (1 + 0.02 * batch * (method == "suffix")), 20, temperature)
        for suite in suites for temperature in temperatures for method, speed in speeds.items() for batch in range(3)
    ]  # fmt: skip
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"config": {}, "sessions": [{}]}))


def test_a_drawn_row_is_measured_alone_by_the_command_of_its_run(tmp_path: Path, evidence: Evidence) -> None:
    write_run(tmp_path / "out" / "run", 2.0)
    found = list(draw.claims(evidence, [Part("p", 1, "", ("python x --out {work}/x", BENCH))]))
    assert {(one.suite, one.temperature, one.method) for one in found} == {
        (suite, temperature, method) for suite in "ab" for temperature in (0.0, 0.8) for method in ("chain:4", "suffix")
    }
    one = next(one for one in found if (one.suite, one.temperature, one.method) == ("b", 0.8, "suffix"))
    assert one.over_plain[0] == pytest.approx(2.04, abs=0.01)
    assert draw.repeated(one, "{work}/again") == (
        "stree bench run --limit 3 --temperature 0.8 --methods plain,suffix --suite b={data}/b.jsonl "
        "--out {work}/again --force"
    )


@pytest.mark.parametrize(("factor", "status"), [(2.1, 0), (3.0, 1)])
def test_drawn_rows_agree_where_intervals_overlap(
    factor: float, status: int, tmp_path: Path, evidence: Evidence, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write_run(tmp_path / "out" / "run", 2.0)

    def again(words: list[str]) -> int:
        suite, temperature, out = (words[words.index(name) + 1] for name in ("--suite", "--temperature", "--out"))
        write_run(Path(out), factor, suite[0], [float(temperature)])
        return 0

    monkeypatch.setattr(draw, "execute", again)
    parts = [Part("p", 1, "", (BENCH,))]
    assert draw.draw(evidence, parts, 8, 0) == status
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.endswith("True |") for row in rows if "suffix" in row] == 4 * [not status]
    assert [row.endswith("True |") for row in rows if "chain" in row] == 4 * [True]
    with pytest.raises(ValueError, match="at most the 8 rows recorded, got 9"):
        draw.draw(evidence, parts, 9, 0)


def test_a_missing_folder_of_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a folder with corpus"):
        Evidence(tmp_path, tmp_path, tmp_path).prepare()
    assert running.option("a --b c", "--b") == "c"


def test_records_name_no_folder_of_the_machine_that_made_them() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*/run.json"):
        for session in json.loads(path.read_text())["sessions"]:
            assert not re.search(r"(^|[ =,])/", session["command"]), path
