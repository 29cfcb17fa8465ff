"""``stree info --check``: the report of a sound model, and of one whose forward differs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.calls import error_of
from helpers.tiny_family_models import family_model

import stree
from stree.cli import check_model, main
from stree.models import passed_checks


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(passed_checks, "_passed", set())
    monkeypatch.setattr(check_model, "STEPS", 2)
    family_model("mamba2").save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def check(checkpoint: Path) -> tuple[int, dict[str, Any]]:
    out = checkpoint.parent / "report.json"
    status = main(["info", str(checkpoint), "--check", "--out", str(out)])
    text = out.read_text()
    assert str(checkpoint.parent) not in text and "Infinity" not in text
    return status, json.loads(text)


def test_a_sound_model_agrees(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = check(checkpoint)
    assert status == 0 and report["ok"]
    assert (report["model"], report["class"], report["dtype"]) == ("tiny", "Mamba2ForCausalLM", "float32")
    assert list(report["layers"]) == ["Mamba-2"] and report["config"]["model_type"] == "mamba2"
    compared = report["self_check"]["compared"]
    assert list(compared) == ["Mamba2Mixer", "logits"] and all(row["error"] < row["bound"] for row in compared.values())
    assert report["text"]["equal"] and report["steps"]["count"] == 2
    assert set(report["steps"]["median_ms"]) == {"1", "16", "64"}
    assert "greedy text   equals model.generate's" in capsys.readouterr().out


def test_a_difference_is_reported_and_the_file_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = type(family_model("mamba2").backbone.layers[0].mixer)
    own = kind.forward

    @functools.wraps(own)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return 1.001 * own(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", scaled)
        status, report = check(checkpoint)
    assert status == 1 and not report["ok"] and "Mamba2Mixer of transformers" in report["error"]
    generate = stree.generate

    def another(*args: Any, **kwargs: Any) -> Any:
        out = generate(*args, **kwargs)
        out.sequences[0][-5] += 1
        return out

    monkeypatch.setattr(check_model, "generate", another)
    status, report = check(checkpoint)
    first = report["text"]["first_difference"]
    assert status == 1 and first["position"] == check_model.NEW_TOKENS - 5 and not first["is_near_tie"]
    assert first["logit_gap"] > 0 and "not a near-tie" in capsys.readouterr().out

    assert "its folder does not exist" in error_of(capsys, "info", "--check", "--out", "/nowhere/report.json")
    assert "--out belongs to --check" in error_of(capsys, "info", "--out", "report.json")
