"""The command line: ``stree generate``, ``serve``, ``batch``, ``info``, ``bench``, ... (``stree --help`` lists all).

One file per subcommand; nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from io import TextIOWrapper

from stree.cli.batch import add_batch
from stree.cli.bench import add_bench
from stree.cli.datastore import add_datastore
from stree.cli.distill import add_distill
from stree.cli.doctor import add_doctor
from stree.cli.export_generate import add_export_generate
from stree.cli.generate import add_generate
from stree.cli.importing import import_own
from stree.cli.info import add_info
from stree.cli.serve import add_serve
from stree.cli.settings import take_settings
from stree.cli.trim_vocab import add_trim_vocab

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0, 2 for a user's mistake, 130 after Ctrl-C, 141 where nothing reads the output any more.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by ``>&-``; a file opened later must not have its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":  # an encoding without a text's letters
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="stree", description="Tree speculative decoding for Mamba and hybrid language models."
    )
    parser.add_argument("--version", action="version", version=f"stree {version('stree')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        add_generate, add_serve, add_batch, add_info, add_doctor, add_bench, add_distill, add_datastore, add_trim_vocab,
        add_export_generate,
    ):  # fmt: skip
        add(commands)
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["serve"]:
            take_settings(commands.choices["serve"], argv, os.environ)
        arguments = parser.parse_args(argv)
        import_own(getattr(arguments, "import", None))
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads the output has read enough, as `head` does
        with suppress(OSError):  # so that what is still buffered raises nothing at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, TypeError, RuntimeError, OSError) as error:  # a generation that failed is a RuntimeError
        print(f"stree: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
