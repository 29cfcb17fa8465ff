"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__all__ = ["add_command", "add_device", "add_target"]


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command that ``run`` runs; ``text`` is its line of help."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    command.set_defaults(run=run)
    return command


def add_target(command: argparse.ArgumentParser) -> None:
    """Add the options that choose the target and its tokenizer."""
    command.add_argument("--target", default="bundled", help="'bundled', a folder, or a hub id")
    command.add_argument("--tokenizer", default=None, help="a folder or hub id, where the target's own has none")


def add_device(command: argparse.ArgumentParser) -> None:
    """Add the options that choose device and dtype."""
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
