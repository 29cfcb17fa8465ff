"""``stree bench run``: measure what is not finished in a directory, with progress, and the settings of its table."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from stree.bench.directory import RunDirectory
from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.plan import Settings, Suite
from stree.bench.rates import Rates, uses_default_rates
from stree.bench.records import Record, busy_load, environment
from stree.bench.runner import Runner
from stree.files import alone_in
from stree.growth.sequoia import SOURCE

__all__ = ["run_bench"]

LOG_EVERY = 15.0  # seconds between lines of progress where there is no terminal


def run_bench(
    pair: Pair, methods: Sequence[Method], suites: Sequence[Suite], settings: Settings, out: Path, *, force: bool,
    rates: Rates | None = None, own: Sequence[str] = (),
) -> None:  # fmt: skip
    """Run what is not finished in ``out``; Sequoia's trees are made from ``rates``, or from the default ones.

    ``own`` are digests of the user's modules that methods come from.

    Raises:
        ValueError: the directory holds another run, or another process writes into it; nothing has run then.
    """
    env = environment(pair.target.device)
    program = Path(sys.argv[0]).name
    command = " ".join(["stree" if program == "__main__.py" else program, *sys.argv[1:]])
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with alone_in(out), Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        config = _config(pair, methods, suites, settings, env)
        if rates is not None:
            config["rates"] = {f"{t:g}": rates.by_temperature[t] for t in settings.temperatures}
        if own:
            config["import"] = [*own]
        directory = RunDirectory(out, config, {**env, "command": command}, force=force)
        task = bar.add_task("measuring")

        runner = Runner(pair, methods, suites, settings, directory, env, rates)
        runner.say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        runner.advance = _shown(bar) if console.is_terminal else _logged(bar, runner)
        bar.update(task, total=runner.num_runs)
        if (load := busy_load()) is not None:
            runner.say(f"warning: the load average is {load:.2f}; times of a busy machine are wrong")
        names = [method.name for method in methods if rates is None and uses_default_rates(method.growth)]
        if names:
            runner.say(f"{', '.join(names)} uses acceptance rates of {SOURCE}; 'stree bench fit-rates' measures others")
        try:
            runner.run()
        except (KeyboardInterrupt, OSError):
            runner.say(
                f"stopped; what is finished is kept in {directory.path}, and the same command goes on from there"
            )
            raise


def _shown(bar: Progress) -> Callable[..., None]:
    """Advance the one task of a bar, which is named after what is done."""

    def advance(count: int, work: str = "measuring") -> None:
        bar.update(bar.tasks[0].id, advance=count, description=work)

    return advance


def _logged(bar: Progress, runner: Runner) -> Callable[..., None]:
    """Advance the one task of a bar, and report a line now and then, as a log shows no bar."""
    task, last = bar.tasks[0], time.monotonic()

    def advance(count: int, work: str = "") -> None:
        nonlocal last
        bar.advance(task.id, count)
        if time.monotonic() - last >= LOG_EVERY:
            last = time.monotonic()
            doing = work and f", {work}"
            left = "" if task.time_remaining is None else f", about {task.time_remaining:.0f} s left"
            after = f"after {task.elapsed or 0:.0f} s"
            runner.say(f"{task.completed:.0f} of {task.total:.0f} runs {after}{left}{doing}")

    return advance


def _config(pair: Pair, methods: Sequence[Method], suites: Sequence[Suite], settings: Settings, env: Record) -> Record:
    """Gather the settings that all records of one table must share."""
    target, drafter = pair.names
    prompts = [pair.encode(prompt.turns[:1], chat=settings.chat) for suite in suites for prompt in suite.prompts]
    return {
        "target": target,
        "drafter": drafter,
        "weights": pair.weights,
        **({} if pair.vocab is None else {"drafter_vocab": _vocab_config(pair.vocab)}),
        "device": env["device"],
        "dtype": pair.dtype,
        **({"compiled": True} if pair.target.is_compiled else {}),
        "threads": env["threads"],
        "suites": {
            s.name: {"prompts": len(s.prompts), "turns": sum(len(p.turns) for p in s.prompts), "file": s.digest}
            for s in suites
        },
        "prompt_tokens": hashlib.sha256(str(prompts).encode()).hexdigest()[:16],
        "methods": [f"{method.name} ({method.verifier})" for method in methods],
        "seed": settings.seeds[0] if len(settings.seeds) == 1 else settings.seeds,
        **{name: getattr(settings, name) for name in settings.__slots__ if name != "seeds"},
    }


def _vocab_config(vocab: Sequence[int]) -> Record:
    """Record a trimmed vocabulary by its size and a digest of its tokens."""
    tokens = sorted(vocab)
    return {"tokens": len(tokens), "digest": hashlib.sha256(str(tokens).encode()).hexdigest()[:16]}
