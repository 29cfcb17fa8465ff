"""``stree doctor``: what it compares, what a fault looks like, and what its file does not hold."""

from __future__ import annotations

import getpass
import json
import re
import socket
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import captured

from stree.cli import check_device, doctor, main
from stree.cli.check_device import compare_layers, compare_operations, compare_texts, without_names
from stree.kernels import ops

CPU = torch.device("cpu")


def test_operations_agree_with_their_references() -> None:
    found = compare_operations(CPU)
    assert found["ok"]
    for op in ("ssd_tree_scan float32", "tree_attention bfloat16", "draw_distinct float32"):
        row = found["compared"][op]
        assert row["error"] <= row["bound"] < 0.05


@pytest.mark.parametrize("name", ["gated_delta_tree_scan", "draw_distinct"])
def test_control_a_wrong_operation_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(ops, name)

    def wrong(*, backend: str = "auto", **given: Any) -> Any:
        found = own(**given, backend=backend)
        if backend != "auto":
            return found
        return (found[0] * 1.05, *found[1:]) if name != "draw_distinct" else (found[0].flip(-1), found[1])

    monkeypatch.setattr(ops, name, wrong)
    found = compare_operations(CPU)
    assert not found["ok"]
    assert {row.split()[0] for row, values in found["compared"].items() if not values["ok"]} == {name}


def test_errors_name_neither_folders_nor_user_nor_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "moonbase")
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    message = "OSError: no '/home/jane/models/x.bin' of jane at moonbase, nor C:\\Users\\jane\\y, ratio 3/4\nmore"
    assert without_names(message) == "OSError: no 'FILE' of NAME at NAME, nor FILE, ratio 3/4"

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr(getpass, "getuser", nameless)  # as in a container that runs as any number
    assert without_names(message) == "OSError: no 'FILE' of jane at NAME, nor FILE, ratio 3/4"


def test_what_does_not_begin_in_time_is_skipped_and_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_device, "MINUTES", -1.0)
    package = Message()
    package["Project-URL"] = "Issues, https://example.org/issues"
    monkeypatch.setattr(doctor, "metadata", lambda name: package)
    assert main(["doctor", "--device", "cpu", "--out", str(tmp_path / "report.json")]) == 1
    out, err = capsys.readouterr()
    assert "no GPU was found" in out and "-1 minutes were over" in out and "https://example.org/issues" in err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["gpu"] is None and not report["ok"] and "skipped" in report["steps"]


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "nowhere"]) == 2
    assert "device must be one that torch finds" in capsys.readouterr().err


@pytest.mark.slow
def test_layers_of_every_kind_agree() -> None:
    found = compare_layers(CPU)
    assert found["ok"] and len([name for name in found["compared"] if name.startswith("logits")]) == 7


@pytest.mark.slow
def test_captured_and_replayed_texts_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = check_device.bundled(CPU)
    rows = compare_texts(captured(monkeypatch, target), draft)
    assert rows["ok"]
    for row in rows["equal_launched"].values():
        assert row["replayed"] and row["graphs"]["not_captured"] == "{}"


@pytest.mark.slow
def test_a_whole_report_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--out", str(tmp_path / "report.json"), "--json"]) == 0
    text = (tmp_path / "report.json").read_text()
    assert json.loads(capsys.readouterr().out) == json.loads(text)
    assert socket.gethostname() not in text and not re.search(r'"[^"]*/(?:home|tmp|root)/', text)
    report = json.loads(text)
    assert set(report["steps"]["nodes"]) == {"1", "16", "64"} and report["steps"]["nodes"]["1"]["bound_us"] > 0
    assert report["texts"]["equal_launched"]["temperature 0.8"]["reference"]
