"""``stree bench run``: resume or begin the run of a directory, with a progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stree.bench.directory import RunDirectory
from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.plan import Settings, Suite
from stree.bench.records import Record, environment
from stree.bench.runner import Reporter, Runner
from stree.files import alone_in

__all__ = ["run_bench"]

ENV = ("device", "threads", "torch", "triton", "transformers", "commit", "dirty", "date")  # in every record


def run_bench(
    pair: Pair, methods: Sequence[Method], suites: Sequence[Suite], settings: Settings, out: Path, *, force: bool
) -> None:
    """Run what is not finished in ``out``.

    Raises:
        ValueError: the directory holds another run, or another process writes into it; nothing has run then.
    """
    env = environment(pair.target.device)
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    base = {"bench": "run", "dtype": pair.dtype, "env": {name: env[name] for name in ENV if name in env}}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with alone_in(out), Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        config = _config(pair, methods, suites, settings, env)
        directory = RunDirectory(out, config, {**env, "command": command}, force=force)
        task = bar.add_task("measuring")

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        reporter = Reporter(say, lambda count: bar.advance(task, count))
        runner = Runner(pair, methods, suites, settings, directory, base=base, reporter=reporter)
        bar.update(task, total=runner.num_runs)
        try:
            runner.run()
        except (KeyboardInterrupt, OSError):
            say(f"stopped; what is finished is kept in {directory.path}, and the same command goes on from there")
            raise


def _config(pair: Pair, methods: Sequence[Method], suites: Sequence[Suite], settings: Settings, env: Record) -> Record:
    """Gather the settings that all records of one table must share."""
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
