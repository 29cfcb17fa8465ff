"""``stree bench``: run methods on prompt suites, report, time kernels, profile a step."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stree.cli.bench_options import add_bench_command, add_models, load_pair, numbers_of
from stree.cli.compiling import advice
from stree.cli.fit_rates import add_fit_rates
from stree.cli.importing import own_digests
from stree.cli.options import add_drafter_vocab, add_import
from stree.growth_names import GROWTHS

__all__ = ["add_bench"]

DEFAULT_BUDGET = 16  # of a profile
METHODS = (
    "a list: plain, transformers, mamba-ssm, transformers-lookup[:TOKENS], transformers-assistant[:TOKENS], "
    "suffix[:NODES], fused[:NODES], auto, chain:FROM-TO (tuned), {unrolled,snapshot,replay,lossy-typical}[:GROWTH], "
    f"each also with @VERIFIER, and the growths {GROWTHS}; a wide choice by default"
)


def add_bench(commands: Any) -> None:
    """Register ``bench`` and its commands with an argparse subparsers object."""
    parser = commands.add_parser("bench", help="measure and compare", description="Measure and compare methods.")
    bench = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(bench)
    add_fit_rates(bench)
    command = add_bench_command(bench, "report", _report, "show one or several runs as a table and one HTML page")
    command.usage = "%(prog)s DIR [DIR ...] [options]"  # behind --ratios a DIR would be one of them
    command.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="directory of a run")
    command.add_argument("--markdown", action="store_true", help="only print the table")
    _add_formats(command)
    command.add_argument(
        "--ratios", nargs="+", metavar="METHOD/METHOD", help="only print ratios of methods over all prompts of a run"
    )
    command.add_argument("--out", type=Path, default=None, help="where report.html goes; by default the first DIR")
    command.add_argument("--plots", type=Path, default=None, metavar="FOLDER", help="also write plots as SVG files")
    command = add_bench_command(
        bench, "kernels", _kernels, "compare every kernel with the reference and time it on a GPU"
    )
    command.add_argument("--smoke", action="store_true", help="tiny sizes, to see that everything runs")
    command.add_argument("--out", type=Path, default=Path("runs/kernels"), help="folder of the records")
    _add_profile(bench)


def _add_run(bench: Any) -> None:
    """Add ``stree bench run``."""
    command = add_bench_command(
        bench, "run", _run, "run methods on prompt suites; the same command resumes an interrupted run"
    )
    add_models(command)
    add_drafter_vocab(command)
    add_import(command)
    command.add_argument(
        "--suite",
        default="bundled",
        help="'bundled' (prompts of code, mathematics and chat in this package), or NAME=FILE,...: files of HumanEval, "
        "GSM8K, MT-Bench, Spec-Bench and SPEED-Bench (named humaneval, gsm8k, mt_bench, spec_bench, speed_bench), or "
        "any name, for JSON lines with a prompt, question, turns or text, or for plain text",
    )
    command.add_argument(
        "--limit", type=int, default=10, help="prompts of each suite, 0 for all; intervals need at least 3"
    )
    command.add_argument("--methods", default=None, help=METHODS)
    command.add_argument("--temperature", default="0", help="one or several, as 0,0.8; 0 is greedy")
    command.add_argument("--top-k", type=int, default=None, help="sample from the k most probable tokens")
    command.add_argument("--top-p", type=float, default=None, help="sample from the smallest set of this probability")
    command.add_argument("--batch-size", type=int, default=1, help="prompts that run together")
    command.add_argument("--max-new-tokens", type=int, default=64, help="tokens of every run")
    command.add_argument(
        "--seed", "--seeds", default="0", help="one or several, as 0,1,2: texts sampled of each prompt"
    )
    command.add_argument("--repeats", type=int, default=1, help="times that each text is measured; the median counts")
    command.add_argument(
        "--acceptance-length", type=float, default=None, metavar="TOKENS",
        help="force the mean tokens of a step of every method that drafts, to time pairs of random weights; not "
        "lossless, and named lossy-forced-TOKENS:METHOD",
    )  # fmt: skip
    command.add_argument(
        "--test-distribution", type=int, default=0, metavar="TEXTS",
        help="texts a suite for the statistical test of sampled text; 0 for none",
    )  # fmt: skip
    command.add_argument(
        "--rates", type=Path, default=None, help="of Sequoia's trees, made by 'stree bench fit-rates' for this pair"
    )
    command.add_argument("--compile", action="store_true", help="compile the scoring of trees on a CPU; needs g++")
    command.add_argument("--chat", action="store_true", help="put prompts through the tokenizer's chat template")
    command.add_argument(
        "--steps", action="store_true", help="also record every step: its tree, accepted path, probabilities and times"
    )
    command.add_argument("--out", type=Path, required=True, help="directory of the run")
    command.add_argument(
        "--force", action="store_true", help="begin anew; results that --out holds become results.jsonl.old"
    )
    _add_formats(command)


def _add_formats(command: argparse.ArgumentParser) -> None:
    """Add the options that choose what is printed of a run."""
    formats = command.add_mutually_exclusive_group()
    formats.add_argument("--csv", action="store_true", help="print all rows as CSV, every interval in columns")
    formats.add_argument("--latex", action="store_true", help="print speed and tau with intervals as a LaTeX table")
    formats.add_argument(
        "--acceptance", action="store_true", help="print acceptance by position, output and user tokens/s (SPEED-Bench)"
    )
    formats.add_argument("--json", action="store_true", help="print all rows as one JSON document in the last line")


def _add_profile(bench: Any) -> None:
    """Add ``stree bench profile``."""
    command = add_bench_command(bench, "profile", _profile, "show where the time of a step goes, and its roofline")
    add_models(command)
    command.add_argument("--growth", default=None, help=f"of a draft model's trees: {GROWTHS}")
    command.add_argument(
        "--budget",
        type=int,
        default=None,
        help="most nodes a step, root included; by default what --growth names or 16",
    )
    command.add_argument("--batch", type=int, default=1, help="sequences")
    command.add_argument("--context", type=int, default=256, help="tokens of the prompts")
    command.add_argument("--max-new-tokens", type=int, default=64, help="tokens that each sequence emits")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--out", type=Path, default=None, help="file of JSON lines to which the profile is appended")
    command.add_argument("--json", action="store_true", help="print it as one JSON document in the last line")


def _run(arguments: argparse.Namespace) -> int:
    """Run ``stree bench run``: check, measure, write and report."""
    from stree.bench.methods import DEFAULT, parse_methods
    from stree.bench.plan import Settings, read_suites
    from stree.bench.prompts import parse_suites
    from stree.bench.report import load_runs, write_page
    from stree.bench.run import run_bench
    from stree.files import check_folder

    check_folder(arguments.out)
    if arguments.limit < 0:
        raise ValueError(f"--limit must not be negative, got {arguments.limit}")
    settings = Settings(
        arguments.max_new_tokens, numbers_of("--temperature", arguments.temperature, float), arguments.batch_size,
        numbers_of("--seed", arguments.seed, int), arguments.test_distribution, arguments.chat, arguments.steps,
        arguments.top_k, arguments.top_p, arguments.repeats,
    )  # fmt: skip
    methods = parse_methods(arguments.methods if arguments.methods is not None else DEFAULT)
    if arguments.acceptance_length is not None:
        if not 1 <= arguments.acceptance_length < math.inf:
            raise ValueError(f"--acceptance-length must be at least 1 and finite, got {arguments.acceptance_length}")
        methods = [method.with_acceptance_length(arguments.acceptance_length) for method in methods]
    suites = read_suites(parse_suites(arguments.suite), arguments.limit or None)
    pair = load_pair(arguments, arguments.drafter_vocab)
    if arguments.compile:
        pair.compile()
    elif line := advice(pair.target):
        print(line, file=sys.stderr)
    pair.encode(suites[0].prompts[0].turns[:1], chat=settings.chat)  # raises for a chat template that does not exist
    rates = None
    if arguments.rates is not None:
        from stree.bench.rates import Rates

        rates = Rates.load(arguments.rates, pair, settings.temperatures)
    own = own_digests(getattr(arguments, "import"))
    run_bench(pair, methods, suites, settings, arguments.out, force=arguments.force, rates=rates, own=own)
    runs = load_runs([arguments.out])
    write_page(runs, arguments.out / "report.html")
    _print_runs(runs, arguments)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    """Run ``stree bench report``."""
    from stree.bench.report import load_runs, ratio_table, write_page, write_plots

    only = [name for name in ("ratios", "markdown", "csv", "latex", "acceptance") if getattr(arguments, name)]
    if only and (arguments.out is not None or arguments.json):
        name = only[0]
        raise ValueError(f"--{name} only prints a table; leave --out and --json out")
    if arguments.ratios and only[1:] not in ([], ["markdown"]):
        raise ValueError(f"--ratios prints a Markdown table; leave --{only[-1]} out")
    runs = load_runs(arguments.directories)
    if arguments.ratios:
        print(*(ratio_table(path, arguments.ratios) for path in arguments.directories), sep="\n")
        return 0
    written = [] if arguments.plots is None else write_plots(runs, arguments.plots)
    if not only:
        written.append((arguments.out or arguments.directories[0]) / "report.html")
        write_page(runs, written[-1])
    print(*(f"written: {path}" for path in written), sep="\n", end="\n" if written else "", file=sys.stderr)
    _print_runs(runs, arguments)
    return 0


def _print_runs(runs: Any, arguments: argparse.Namespace) -> None:
    """Print runs in the format that is asked for; by default as tables, to which JSON adds a line."""
    from stree.bench.formats import acceptance_table, csv_rows, latex
    from stree.bench.report import markdown
    from stree.bench.tables import interval_note

    if arguments.csv:
        print(csv_rows([(run.name, run.rows) for run in runs]))
        return
    for run in runs:
        if arguments.latex:
            print(latex(run.rows, run.command, run.made_on))
            continue
        print(f"{run.name}:\n" if len(runs) > 1 else "", end="")
        print((acceptance_table if arguments.acceptance else markdown)(run.rows) + interval_note(run.rows))
    if arguments.json:
        rows = [{"run": run.name, **row} for run in runs for row in run.rows]
        print(json.dumps({"bench": "run", "rows": rows, "env": runs[0].sessions[-1]}))


def _kernels(arguments: argparse.Namespace) -> int:
    """Run ``stree bench kernels``: the kernel cases of the repository's GPU suite, in a process of its own."""
    import torch

    from stree.bench.records import ROOT

    if not (ROOT / "benchmarks" / "gpu" / "suite.py").is_file():
        raise ValueError("kernel benches are run from a checkout of the repository: benchmarks/gpu/suite.py is missing")
    if not (arguments.smoke or torch.cuda.is_available()):
        raise ValueError("kernel benches need a CUDA device; --smoke runs tiny sizes under Triton's interpreter")
    environment = {**os.environ, **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.suite",
        "--out",
        str(arguments.out.resolve()),
    ]
    command += ["--smoke"] if arguments.smoke else []
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _profile(arguments: argparse.Namespace) -> int:
    """Run ``stree bench profile``."""
    for name, least in (("budget", 1), ("batch", 1), ("context", 1), ("max_new_tokens", 2)):
        if getattr(arguments, name) is not None and getattr(arguments, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")
    from rich.console import Console

    from stree.bench.profile import Shape, profile, profile_tables
    from stree.bench.records import append, environment
    from stree.files import check_folder
    from stree.growth import sized_growth

    if arguments.out is not None:
        if arguments.out.is_dir():
            raise ValueError(f"--out must be a file, got the folder {arguments.out}")
        check_folder(arguments.out.parent)
    growth, budget = sized_growth(arguments.growth, arguments.budget, DEFAULT_BUDGET)
    pair = load_pair(arguments)
    if pair.head is not None:
        raise ValueError("stree bench profile times draft models, not draft heads; name another --drafter")
    if growth is not None and pair.drafter is None:
        raise ValueError("--growth shapes the trees of a draft model; there is none, give one with --drafter")
    shape = Shape(
        growth,
        budget,
        arguments.batch,
        arguments.context,
        arguments.max_new_tokens,
        arguments.temperature,
    )
    record = profile(pair, shape) | {"env": environment(pair.target.device)}
    Console().print(*profile_tables(record))
    if arguments.out is not None:
        append(arguments.out, [record])
    if arguments.json:
        print(json.dumps(record))
    return 0
