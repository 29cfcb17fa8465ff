"""What the commands of ``stree bench`` share: their options, and the models that these name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from stree.cli.options import add_command, add_device

__all__ = ["add_bench_command", "add_models", "load_pair", "numbers_of"]

Number = TypeVar("Number", int, float)


def add_bench_command(
    bench: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add one command, which names the extra to install where a package of it is missing."""

    def guarded(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; install stree[bench]") from error

    return add_command(bench, name, guarded, text)


def add_models(command: argparse.ArgumentParser) -> None:
    """Add the options that choose models and device."""
    command.add_argument("--target", default="bundled", help="'bundled', 'smollm2', a folder, or a hub id")
    command.add_argument(
        "--drafter",
        default=None,
        help="likewise, 'smollm2:6' for its first layers, or a draft head, 'bundled-mtp', 'mtp' or 'none'; by default "
        "'bundled' for the bundled target, else 'none'",
    )
    add_device(command)
    command.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")


def numbers_of(option: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    """Read one number or several, as ``float`` or ``int``."""
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as error:
        example = "0,0.8" if kind is float else "0,1"
        raise ValueError(f"{option} must be a number or several, as {example}, got {text!r}") from error


def load_pair(arguments: argparse.Namespace, drafter_vocab: str | None = None) -> Any:
    """Load the models that the options name."""
    import torch

    from stree.bench.pair import Pair

    if arguments.threads < 0:
        raise ValueError(f"--threads must not be negative, got {arguments.threads}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return Pair.load(arguments.target, arguments.drafter, arguments.device, arguments.dtype, drafter_vocab)
