"""The ``stree bench`` commands: their options, and what each does.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["add_bench"]


def add_bench(commands: Any) -> None:
    """Register ``bench`` and its commands with an argparse subparsers object."""
    parser = commands.add_parser("bench", help="measure and compare", description="Measure and compare methods.")
    bench = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(bench)
    _add_report(bench)
    _add_kernels(bench)
    _add_profile(bench)


def _add(bench: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    """Add one command."""
    command: argparse.ArgumentParser = bench.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    command.set_defaults(run=_guarded(run))
    return command


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Turn what goes wrong outside the program (a full disk, a missing package) into what ends with a message."""

    def guarded(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}; install stree[bench]") from error
        except (OSError, RuntimeError) as error:
            raise ValueError(str(error)) from error

    return guarded


def _add_models(command: argparse.ArgumentParser) -> None:
    """Add the options that choose models and device."""
    command.add_argument("--target", default="bundled", help="'bundled', a folder, or a hub id")
    command.add_argument(
        "--drafter", default=None, help="likewise, or 'none'; by default 'bundled' for the bundled target, else 'none'"
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, ...")
    command.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")


def _add_run(bench: Any) -> None:
    """Describe ``stree bench run``."""
    command = _add(bench, "run", _run, "run methods on prompt suites; an interrupted run goes on where it stopped")
    _add_models(command)
    command.add_argument(
        "--suite",
        required=True,
        help="NAME=FILE,...: files of HumanEval, GSM8K, MT-Bench and Spec-Bench (named humaneval, gsm8k, mt_bench, "
        "spec_bench), or any name for JSON lines with a prompt, question, turns or text, or for plain text",
    )
    command.add_argument("--limit", type=int, default=10, help="prompts of each suite; 0 for all")
    command.add_argument("--methods", default=None, help="see benchmarks/README.md; a wide choice by default")
    command.add_argument("--verifier", default="auto", help="of the methods that name none with @VERIFIER")
    command.add_argument("--temperature", default="0", help="one or several, as 0,0.8; 0 is greedy")
    command.add_argument("--batch-size", type=int, default=1, help="prompts that run together")
    command.add_argument("--max-new-tokens", type=int, default=64, help="tokens of every run")
    command.add_argument("--repeats", type=int, default=1, help="runs of each prompt and method, each with its seed")
    command.add_argument("--seed", type=int, default=0, help="of the first run")
    command.add_argument("--check", type=int, default=1, help="prompts of each suite compared before timing")
    command.add_argument(
        "--test-law", type=int, default=0, metavar="TEXTS",
        help="texts a checked prompt for the statistical test of sampled text; 0 for none",
    )  # fmt: skip
    command.add_argument("--held-out", type=int, default=2, help="prompts of each suite on which chain:A-B is tuned")
    command.add_argument("--chat", action="store_true", help="put prompts through the tokenizer's chat template")
    command.add_argument("--nodes", default="8,16,32,64", help="tree sizes of the step costs; empty for none")
    command.add_argument("--rounds", type=int, default=10, help="timed steps of each size")
    command.add_argument("--out", type=Path, required=True, help="directory of the run")
    command.add_argument("--force", action="store_true", help="begin anew where --out holds another run")
    command.add_argument("--json", action="store_true", help="print all rows as one JSON document in the last line")


def _add_report(bench: Any) -> None:
    """Describe ``stree bench report``."""
    command = _add(bench, "report", _report, "tables, CSV and one HTML page of one or several runs")
    command.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="directory of a run")
    command.add_argument("--markdown", action="store_true", help="only print the README's table")
    command.add_argument("--all", action="store_true", help="every method in the README's table, not the fastest only")
    command.add_argument("--out", type=Path, default=None, help="where the files go; by default the first DIR")
    command.add_argument("--json", action="store_true", help="print all rows as one JSON document in the last line")


def _add_kernels(bench: Any) -> None:
    """Describe ``stree bench kernels``."""
    command = _add(bench, "kernels", _kernels, "time the kernels: those of the GPU, or the reference on a CPU")
    command.add_argument("names", nargs="*", metavar="BENCH", help="reference, suite; by default what the machine has")
    command.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs")
    command.add_argument("--out", type=Path, default=None, help="folder to which kernels.jsonl is appended")


def _add_profile(bench: Any) -> None:
    """Describe ``stree bench profile``."""
    command = _add(bench, "profile", _profile, "show where the time of a step goes, and its roofline")
    _add_models(command)
    command.add_argument("--growth", default=None, help="of a draft model's trees; see stree/growth/README.md")
    command.add_argument("--budget", type=int, default=16, help="most nodes a step, root included")
    command.add_argument("--batch", type=int, default=1, help="sequences")
    command.add_argument("--context", type=int, default=256, help="tokens of the prompts")
    command.add_argument("--max-new-tokens", type=int, default=64, help="tokens that each sequence emits")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--out", type=Path, default=None, help="file of JSON lines to which the profile is appended")
    command.add_argument("--json", action="store_true", help="print it as one JSON document in the last line")


def _run(arguments: argparse.Namespace) -> int:
    """Run ``stree bench run``."""
    from stree.bench.start import start_run

    return start_run(arguments)


def _report(arguments: argparse.Namespace) -> int:
    """Run ``stree bench report``."""
    from rich.console import Console

    from stree.bench.report import load_runs, print_markdown, write_report

    if arguments.markdown and (arguments.out is not None or arguments.json):
        raise ValueError("--markdown only prints a table; leave --out and --json out")
    if arguments.all and not arguments.markdown:
        raise ValueError("--all is for --markdown; the report's own tables have every method")
    runs = load_runs(arguments.directories)
    if arguments.markdown:
        print_markdown(runs, Console(), every=arguments.all)
    else:
        write_report(runs, arguments.out or arguments.directories[0], Console(), as_json=arguments.json)
    return 0


def _kernels(arguments: argparse.Namespace) -> int:
    """Run ``stree bench kernels``."""
    from rich.console import Console

    from stree.bench.kernels import run_benches

    run_benches(arguments.names, smoke=arguments.smoke, out=arguments.out, console=Console())
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    """Run ``stree bench profile``."""
    from stree.bench.start import start_profile

    return start_profile(arguments)
