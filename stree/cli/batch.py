"""``stree batch``: texts for the prompts of a file, by workers of Ray."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from stree.cli.generate import generation_options, prepare
from stree.cli.importing import import_own, own_digests
from stree.cli.options import add_command, add_generation

__all__ = ["add_batch"]


def add_batch(commands: Any) -> None:
    """Register the command with an argparse subparsers object."""
    text = "generate for every prompt of a file with Ray; the same command goes on with a job that was interrupted"
    command = add_command(commands, "batch", _batch, text)
    command.add_argument(
        "input", type=Path, metavar="INPUT",
        help="JSON lines with prompt or messages, also in OpenAI's batch format, or .parquet with such columns",
    )  # fmt: skip
    command.add_argument("--out", type=Path, required=True, help="folder of part-*.jsonl and rejected.jsonl")
    command.add_argument("--workers", type=int, default=1, help="processes with a model each")
    command.add_argument(
        "--gpus-per-worker", type=float, default=None,
        help="GPUs of each worker, or a share of one; by default 1 where the cluster has GPUs, unless --device is cpu",
    )  # fmt: skip
    command.add_argument("--max-batch", type=int, default=8, help="most sequences of a worker at once")
    add_generation(command, default_budget="auto")


def _batch(arguments: argparse.Namespace) -> int:
    """Run ``stree batch``."""
    from stree.checks import check_counts
    from stree.integrations.batch_folder import open_job
    from stree.integrations.batch_rows import checksum, read_rows
    from stree.integrations.ray import check_ray

    check_counts(workers=arguments.workers, max_batch=arguments.max_batch)
    gpus = arguments.gpus_per_worker
    if gpus is not None and not 0 <= gpus < float("inf"):
        raise ValueError(f"--gpus-per-worker must be finite and not negative, got {gpus}")
    options = generation_options(arguments)
    for name in ("target", "tokenizer", "drafter", "datastore", "drafter_vocab"):  # workers may be in another folder
        setattr(arguments, name, _absolute(getattr(arguments, name)))
    own = (getattr(arguments, "import") or "").split(",")
    files = [str(Path(name).resolve()) if name.endswith(".py") else name for name in own]
    setattr(arguments, "import", ",".join(files))
    settings: dict[str, Any] = {"input": checksum(arguments.input)}
    rows = read_rows(arguments.input)
    if any(row.reason is None for row in rows):
        check_ray()  # before anything is written
    prepare(arguments)  # names mistakes, and fills in the default drafter
    settings |= _settings(arguments, options)
    if digests := own_digests(getattr(arguments, "import")):
        settings["import"] = digests
    with open_job(arguments.out, settings) as job:
        pending = job.pending(rows)
        if pending:
            _run(arguments, job, pending, len(rows))
        print(f"{arguments.out}: {len(rows)} rows, {len(job.finished)} finished, {len(job.rejected)} rejected")
    return 0


def _absolute(name: str | None) -> str | None:
    """Return a path, also that of 'fused:PATH', as an absolute one, and any other name as it is."""
    if name is None or name in ("bundled", "bundled-mtp", "suffix", "none", "mtp", "fused"):
        return name
    kind = "fused:" if name.startswith("fused:") else ""
    path = Path(name.removeprefix(kind))
    return f"{kind}{path.resolve()}" if path.exists() else name


def _settings(arguments: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """List what decides the texts of a job; workers and devices do not."""
    names = ("target", "tokenizer", "drafter", "datastore", "drafter_vocab", "growth", "verifier", "chat")
    return {
        "budget": str(options["budget"]),
        **{name: getattr(arguments, name) for name in (*names, "dtype", "max_new_tokens", "seed")},
        **asdict(options["sampling"]),
    }


def _run(arguments: argparse.Namespace, job: Any, pending: list[Any], total: int) -> None:
    """Run the rows that are left; write each as it comes."""
    from stree.cli.progress import RowProgress
    from stree.integrations.ray import local_ray, run_rows

    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread of a job that ends must not start Ray anew
    for row in pending:  # rows with random numbers of their own, whatever the others of a call
        row.request.setdefault("seed", arguments.seed + row.number)
    with local_ray(arguments.workers), RowProgress(total, total - len(pending)) as progress:
        results = run_rows(
            pending, partial(load_rows, arguments), workers=arguments.workers,
            gpus_per_worker=_gpus(arguments), max_batch=arguments.max_batch,
        )  # fmt: skip
        with closing(results):  # before Ray ends
            for result in results:
                job.add([result])
                progress.advance()


def load_rows(arguments: argparse.Namespace) -> Any:
    """Load the models in a worker."""
    from stree.integrations.batch_generate import RowGenerator

    import_own(getattr(arguments, "import"))
    options = generation_options(arguments)
    tokenizer, load = prepare(arguments)
    lm, drafter = load()
    own = {name: options.pop(name) for name in ("sampling", "max_new_tokens")}
    del options["seed"]  # of every row
    return RowGenerator(
        lm, tokenizer, drafter, max_batch=arguments.max_batch, chat=arguments.chat, options=options, **own
    )


def _gpus(arguments: argparse.Namespace) -> float:
    """Return the GPUs of a worker: those asked for, else 1 where there are any to run on."""
    if arguments.gpus_per_worker is not None:
        return float(arguments.gpus_per_worker)
    import ray

    return float(arguments.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0)
