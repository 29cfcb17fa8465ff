"""From the command line's options to a run: models, suites, methods, directory, progress bar."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stree.bench.directory import RunDirectory, brief, session
from stree.bench.methods import DEFAULT, Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.plan import Settings, Suite, read_suites
from stree.bench.profile import Shape, profile, profile_tables
from stree.bench.prompts import parse_suites
from stree.bench.records import Record, append, command_line, environment
from stree.bench.report import load_runs, write_report
from stree.bench.runner import Runner
from stree.bench.steps import measure_steps
from stree.files import alone_in, check_folder
from stree.growth import parse_growth

__all__ = ["start_profile", "start_run"]


def start_run(arguments: argparse.Namespace) -> int:
    """Check, measure, write and report.

    Raises:
        ValueError: a bad option, file or directory; nothing has run then.
    """
    settings = _settings(arguments)
    nodes = _sizes(arguments.nodes, "--nodes")
    methods = parse_methods(DEFAULT if arguments.methods is None else arguments.methods, arguments.verifier)
    suites = read_suites(parse_suites(arguments.suite), arguments.limit or None, settings)
    pair = _load(arguments)
    prompt = pair.encode(suites[0].prompts[0].turns[:1], chat=settings.chat)  # refuses a template that is not there
    env = session(pair.target.device, command_line())
    config = _config(pair, methods, suites, settings, env)
    base = {"bench": "run", "dtype": pair.dtype, "env": brief(env)}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with alone_in(arguments.out), Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        directory = RunDirectory(arguments.out, config, env, force=arguments.force)
        task = bar.add_task("measuring")

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        runner = Runner(
            pair, methods, suites, settings, directory, base=base, say=say, advance=lambda n: bar.advance(task, n)
        )
        bar.update(task, total=runner.num_runs)
        try:
            runner.run()
            nodes = [n for n in dict.fromkeys(nodes) if not directory.find("sizes", nodes=n)]  # the last one of a size
            if nodes:
                bar.update(task, description="step costs")
                directory.add(measure_steps(pair, prompt, nodes, arguments.rounds, base))
        except (KeyboardInterrupt, OSError):
            say(f"stopped; what is finished is kept in {directory.path}, and the same command goes on from there")
            raise
    write_report(load_runs([arguments.out]), arguments.out, Console(), as_json=arguments.json)
    return 0


def start_profile(arguments: argparse.Namespace) -> int:
    """Profile steps, print tables, and append the record to a file.

    Raises:
        ValueError: a bad option.
    """
    for name, least in (("budget", 1), ("batch", 1), ("context", 1), ("max_new_tokens", 2)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")
    _check_file(arguments.out)
    growth = None if arguments.growth is None else parse_growth(arguments.growth)
    pair = _load(arguments)
    if growth is not None and pair.drafter is None:
        raise ValueError("--growth shapes the trees of a draft model; there is none, give one with --drafter")
    shape = Shape(
        growth, arguments.budget, arguments.batch, arguments.context, arguments.max_new_tokens, arguments.temperature
    )
    record = profile(pair, shape) | {"env": brief(environment(pair.target.device))}
    console = Console()
    for table in profile_tables(record):
        console.print(table)
    if arguments.out is not None:
        append(arguments.out, [record])
    if arguments.json:
        console.print(json.dumps(record), markup=False, highlight=False, soft_wrap=True)
    return 0


def _check_file(path: Path | None) -> None:
    """Refuse a folder in the place of a file, and a file in that of its folder, before anything is measured."""
    if path is not None and path.is_dir():
        raise ValueError(f"--out must be a file, got the folder {path}")
    if path is not None:
        check_folder(path.parent)


def _settings(arguments: argparse.Namespace) -> Settings:
    """Read how prompts are run."""
    temperatures = tuple(dict.fromkeys(_number(text, "--temperature") for text in arguments.temperature.split(",")))
    settings = Settings(
        arguments.max_new_tokens, temperatures, arguments.batch_size, arguments.repeats, arguments.seed,
        arguments.check, arguments.test_law, arguments.held_out, arguments.chat,
    )  # fmt: skip
    if arguments.limit < 0 or arguments.rounds < 1:
        raise ValueError(f"--limit and --rounds must be positive, got {arguments.limit} and {arguments.rounds}")
    return settings


def _load(arguments: argparse.Namespace) -> Pair:
    """Load the pair that the options name."""
    if arguments.threads < 0:
        raise ValueError(f"--threads must not be negative, got {arguments.threads}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return Pair.load(arguments.target, arguments.drafter, arguments.device, arguments.dtype)


def _config(pair: Pair, methods: Sequence[Method], suites: Sequence[Suite], settings: Settings, env: Record) -> Record:
    """Gather what must be equal for two records to stand in one table."""
    target, drafter = pair.names
    return {
        "target": target,
        "drafter": drafter,
        "device": env["device"],
        "dtype": pair.dtype,
        "threads": env["threads"],
        "suites": {s.name: {"prompts": len(s.prompts), "file": s.digest} for s in suites},
        "methods": [f"{method.name} ({method.verifier})" for method in methods],
        **{name: getattr(settings, name) for name in settings.__slots__},
    }


def _number(text: str, option: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{option} must be a number or several, as 0,0.8, got {text!r}") from error


def _sizes(text: str, option: str) -> list[int]:
    """Read positive integers."""
    sizes = text.split(",") if text else []
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"{option} must be positive numbers, as 8,16, got {text!r}")
    return [int(size) for size in sizes]
