"""A run's directory: its configuration, the machines that worked on it, and the records of what is finished.

``run.json`` holds ``config``, which must be the same when a run goes on, and ``sessions``, the environment of every
start.  ``results.jsonl`` holds the records; a prompt (a batch of them) is written when all methods have run it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stree.bench.records import Record, append, environment, read, write
from stree.files import replacing

__all__ = ["Key", "RunDirectory", "brief", "key_of", "session"]

Key = tuple[str, int, int, float]  # suite, batch, turn, temperature: what is interleaved, written and resumed


def key_of(record: Record) -> Key:
    """Name the batch of prompts that a timed record is about."""
    params = record["params"]
    return params["suite"], params["batch"], params["turn"], params["temperature"]


class RunDirectory:
    """Records on disk, and in memory.

    Args:
        path: the directory; made if need be.
        config: what must be equal for two records to stand in one table; JSON-able.
        env: environment of this start.
        force: begin anew where the directory holds a run of another configuration; its results are kept beside, as
            ``results.jsonl.old``.

    Raises:
        ValueError: the directory holds a run of another configuration, or a broken file.
    """

    def __init__(self, path: Path, config: dict[str, Any], env: Record, *, force: bool = False) -> None:
        self.path, self.results, self._about = path, path / "results.jsonl", path / "run.json"
        path.mkdir(parents=True, exist_ok=True)
        known = self._known(force)
        difference = self._difference(known, json.loads(json.dumps(config)))
        if difference and not force:
            raise ValueError(f"{path} holds {difference}; choose another --out, or --force to begin anew")
        if difference:
            known = None
            if self.results.exists():
                os.replace(self.results, self.results.with_suffix(".jsonl.old"))
        sessions = [*(known["sessions"] if known else []), env]
        with replacing(self._about) as beside:
            beside.write_text(json.dumps({"config": config, "sessions": sessions}, indent=1) + "\n", encoding="utf-8")
        self.records = read(self.results)

    def _known(self, force: bool) -> dict[str, Any] | None:
        """Read run.json; None where there is none."""
        if not self._about.exists():
            return None
        try:
            known = json.loads(self._about.read_text(encoding="utf-8"))
            known["config"], known["sessions"] = dict(known["config"]), list(known["sessions"])
        except (ValueError, KeyError, TypeError) as error:
            if force:
                return None
            raise ValueError(f"{self._about} cannot be read: {error}; --force begins anew") from error
        return dict(known)

    def _difference(self, known: dict[str, Any] | None, asked: dict[str, Any]) -> str:
        """Say in what the run on disk differs; empty where it does not, or where there is none."""
        if known is None:
            return "results without a run.json" if self.results.exists() else ""
        was = known["config"]
        for name in sorted(was.keys() | asked.keys()):
            if was.get(name) != asked.get(name):
                return f"a run with {name} {was.get(name)!r}, not {asked.get(name)!r}"
        return ""

    def keep(self, finished: Iterable[Key]) -> None:
        """Drop timed records of prompts and of tree sizes that are not finished, and a line that was cut off."""
        whole = set(finished)
        sizes = {r["params"]["nodes"] for r in self.find("sizes")}  # the last record of a tree size
        kept = [
            r for r in self.records
            if (r["metric"] != "tokens_per_s" or key_of(r) in whole)
            and (r["metric"] not in ("step_latency", "state_bytes") or r["params"]["nodes"] in sizes)
        ]  # fmt: skip
        if self.results.exists():
            write(self.results, kept)
        self.records = kept

    def add(self, records: list[Record]) -> None:
        """Write records at once.

        Raises:
            OSError: the disk is full, ...; what was written before is kept.
        """
        append(self.results, records)
        self.records += records

    def find(self, metric: str, **params: Any) -> list[Record]:
        """List the records of a metric with these parameters."""
        of_metric = (record for record in self.records if record["metric"] == metric)
        return [r for r in of_metric if all(r["params"].get(name) == value for name, value in params.items())]


def brief(env: Record) -> Record:
    """Take what every record says about its machine."""
    names = ("device", "threads", "torch", "triton", "transformers", "commit", "dirty", "date")
    return {name: env[name] for name in names if name in env}


def session(device: Any, command: str) -> Record:
    """Describe a start: environment and command."""
    return {**environment(device), "command": command}
