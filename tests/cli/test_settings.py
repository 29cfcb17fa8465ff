"""Options of ``stree serve`` from a file and from the environment.

Run: python -m pytest tests/cli/test_settings.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from stree.cli import main
from stree.cli.serve import add_serve
from stree.cli.settings import take_settings


def parsed(arguments: list[str], environment: dict[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_serve(commands)
    take_settings(commands.choices["serve"], arguments, environment)
    return parser.parse_args(arguments)


def test_the_command_line_wins_over_the_environment_and_this_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "stree.yaml"
    file.write_text(
        "target: some/mödel\nmax-batch: 3\nmax_queue: 7\ngrace: 2.5\neager: true\nlog-format: json\n", "utf-8"
    )
    found = parsed(
        ["serve", "--config", str(file), "--max-queue", "9"],
        {"STREE_MAX_BATCH": "5", "STREE_MAX_QUEUE": "8", "STREE_COMPILE": "1", "STREE_DEBUG": "1", "HOME": "/"},
    )
    assert (found.target, found.max_batch, found.max_queue, found.grace) == ("some/mödel", 5, 9, 2.5)
    assert (found.eager, found.compile, found.log_format) == (True, True, "json")
    assert parsed(["serve", "another"], {"STREE_CONFIG": str(file)}).target == "another"
    assert parsed(["serve", "--conf", str(file)], {}).max_batch == 3, "argparse takes the beginning of a name"
    file.write_text("target:\nmax-batch: null\neager:\n")
    for untouched in (parsed(["serve"], {}), parsed(["serve", "--config", str(file)], {})):
        assert (untouched.target, untouched.max_batch, untouched.eager) == ("bundled", 8, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-batch: 3\nmax_batch: 4", "names an option twice: max_batch"),
        ("eager: true\neager: false", "names an option twice: eager"),
        ("max_batches: 3", "names no options of this command: max_batches"), ("[1]", "must hold names of options"),
        ("a: b: c", "is no YAML"), ("eager: perhaps", "eager must be true or false, got 'perhaps'"),
        ("log_format: xml", "log-format must be one of text, json, got 'xml'"),
        ("host: [a, b]", "host must be one value"), (None, "No such file"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_named(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stree.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("stree: error: ") and said in error and "\n" not in error


def test_a_value_of_the_environment_is_read_as_one_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREE_PORT", "many")
    for arguments, said in (
        (["serve"], "--port: invalid int value: 'many'"),
        (["serve", "--config"], "--config: expected"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert f"argument {said}" in capsys.readouterr().err
