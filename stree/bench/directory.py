"""A run's directory: its configuration, the machines that worked on it, and the records of what is finished.

``run.json`` holds ``config``, which must be the same when a run is resumed, and ``sessions``, the environment of every
start.  ``results.jsonl`` holds the records; those of a batch of prompts are written when all methods have run it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stree.bench.methods import Method
from stree.bench.plan import Block, Key
from stree.bench.records import Record, append, read, unpack, write
from stree.files import replacing

__all__ = ["RunDirectory", "finished_keys", "key_of", "read_about"]


def key_of(record: Record) -> Key:
    """Read the block that a timed record is about."""
    params = record["params"]
    return Key(params["suite"], params["batch"], params["turn"], params["temperature"], params.get("seed", 0))


def finished_keys(blocks: Sequence[Block], methods: Sequence[Method], records: Sequence[Record]) -> set[Key]:
    """List the blocks that need no run: they were skipped, or every method has run them or cannot run."""
    timed = {(key_of(r), r["provider"]) for r in records if r["metric"] == "tokens_per_s"}
    skipped = {key_of(r) for r in records if r["metric"] == "skipped"}
    bad_checks = [r for r in records if r["metric"] == "check" and r["status"] != "ok"]
    excluded = {(r["params"]["suite"], r["params"]["temperature"], r["provider"]) for r in bad_checks}

    def is_finished(key: Key) -> bool:
        return key in skipped or all(
            (key, method.name) in timed or (key.suite, key.temperature, method.name) in excluded for method in methods
        )

    return {block.key for block in blocks if is_finished(block.key)}


def read_about(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read the configuration and the sessions of a ``run.json``.

    Raises:
        ValueError: it is damaged.
    """
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return dict(about["config"]), [dict(session) for session in about["sessions"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


class RunDirectory:
    """Records on disk, and in memory.

    Args:
        path: the directory; made if need be.
        config: settings that all records of one table must share; JSON-able.
        env: environment of this start.
        force: begin anew; results that the directory holds are kept as ``results.jsonl.old``.

    Raises:
        ValueError: the directory holds a run of another configuration, or a damaged file.
    """

    def __init__(self, path: Path, config: dict[str, Any], env: Record, *, force: bool = False) -> None:
        self.path, self.results = path, path / "results.jsonl"
        about = path / "run.json"
        path.mkdir(parents=True, exist_ok=True)
        unpack(self.results)
        sessions: list[Record] = []
        if force and self.results.exists():
            os.replace(self.results, self.results.with_suffix(".jsonl.old"))
        elif not force:
            try:
                sessions = self._sessions(about, json.loads(json.dumps(config)))
            except ValueError as error:
                raise ValueError(f"{error}; choose another --out, or --force to begin anew") from error
        with replacing(about) as beside:
            text = json.dumps({"config": config, "sessions": [*sessions, env]}, indent=1)
            beside.write_text(text + "\n", encoding="utf-8")
        self.records = read(self.results)

    def _sessions(self, about: Path, config: dict[str, Any]) -> list[Record]:
        """Read the sessions of a run that can be resumed; none where there is no run.

        Raises:
            ValueError: a run that cannot be resumed.
        """
        if not about.exists():
            if self.results.exists():
                raise ValueError(f"{self.path} holds results without a run.json")
            return []
        before, sessions = read_about(about)
        for name in sorted(before.keys() | config.keys()):
            if before.get(name) != config.get(name):
                raise ValueError(
                    f"{self.path} holds a run with {_difference(name, before.get(name), config.get(name))}"
                )
        return sessions

    def keep(self, finished: Iterable[Key]) -> None:
        """Drop timed records of blocks that are not finished, and a line that was cut off."""
        whole = set(finished)
        self.records = [r for r in self.records if r["metric"] != "tokens_per_s" or key_of(r) in whole]
        if self.results.exists():
            write(self.results, self.records)

    def add(self, records: list[Record]) -> None:
        """Write records at once.

        Raises:
            OSError: the disk is full, ...; what was written before is kept.
        """
        append(self.results, records)
        self.records += records

    def find(self, metric: str, **params: Any) -> list[Record]:
        """List the records of a metric with these parameters."""
        return [r for r in self.records if r["metric"] == metric and params.items() <= r["params"].items()]


def _difference(name: str, held: Any, wanted: Any) -> str:
    """Describe how a setting differs: of suites of the same names by the number of prompts, or by the file."""
    if name != "suites" or not held or held.keys() != wanted.keys():
        return f"{name} {held!r}, not {wanted!r}"
    suite = next(suite for suite in held if held[suite] != wanted[suite])
    before, now = held[suite]["prompts"], wanted[suite]["prompts"]
    if held[suite].get("file") == wanted[suite]["file"] and before == now:
        return "settings of an earlier version"
    if before == now:
        return f"another file of the suite {suite}"
    return f"{before} prompts of the suite {suite}, not {now} (--limit)"
