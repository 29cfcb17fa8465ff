"""``stree distill`` as a user runs it; what it makes is tested in tests/distill."""

from __future__ import annotations

from pathlib import Path

import pytest

from stree.cli import main
from stree.distill import run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "nowhere"], "there is no file or folder nowhere"),
        (["--text", "{text}", "--length", "100"], "length must be a multiple of 64"),
        (["--text", "{text}", "--dtype", "float16"], "dtype must be bfloat16 or float32"),
        (["--text", "{text}", "--target", "no/such/folder"], "no tokenizer that transformers can read"),
        (["--text", "{text}"], "the text has 3 tokens; training on windows of 512 needs at least 1026"),
        (["--text", "{text}", "--resume"], "there is nothing to resume"),
    ],
)
def test_mistakes_on_the_command_line_are_said_and_leave_nothing(
    options: list[str], message: str, target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("w1 w2", encoding="utf-8")
    filled = [option.format(text=tmp_path / "text.txt") for option in options]
    chosen = [] if "--target" in options else ["--target", target_folder]
    assert main(["distill", *filled, *chosen, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error, error
    assert not (tmp_path / "out").exists()


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
