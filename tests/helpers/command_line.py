"""The command line, run in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stree.cli import main


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Run a command with ``--json``; return its last line."""
    assert main([*arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that ends with status 2; return what it says."""
    assert main([*arguments]) == 2
    return capsys.readouterr().err
