"""``stree distill`` as a user runs it; what it makes is tested in tests/distill."""

from __future__ import annotations

from pathlib import Path

import pytest

from stree.cli import main
from stree.distill import run


def test_ctrl_c_says_how_to_go_on(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "fit", interrupted)
    (tmp_path / "text.txt").write_text("w1 w2 w3 " * 20, encoding="utf-8")
    command = [
        "distill",
        "--target",
        target_folder,
        "--text",
        str(tmp_path / "text.txt"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--length", "16", "--hidden", "16", "--layers", "1"]) == 130
    assert "--resume goes on from the last checkpoint" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoints" / "run.json").exists()
