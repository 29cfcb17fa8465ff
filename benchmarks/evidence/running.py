"""Run the commands of parts in processes of their own, and keep a list of those that are finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired

from benchmarks import ROOT
from benchmarks.evidence.parts import Part
from stree.bench.records import append, read_lines
from stree.bench.smollm2 import prepared

__all__ = ["Evidence", "execute", "option"]

PROGRAMS = {"stree": (sys.executable, "-m", "stree.cli"), "python": (sys.executable,)}
PATIENCE = 60  # seconds that an interrupted command has to end


def option(command: str, name: str) -> str:
    """Read the value of an option of a command."""
    words = command.split()
    return words[words.index(name) + 1]


def execute(words: Sequence[str]) -> int:
    """Run a command and return its exit status; Ctrl-C interrupts it, and is raised when it has ended."""
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(PATIENCE)
        except (KeyboardInterrupt, TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


class Evidence:
    """Folders of the evidence, and what is finished.

    Args:
        data: folder of suites and corpora; None where nothing is run.
        out: folder of the records.
        work: folder of other files.
    """

    def __init__(self, data: Path | None, out: Path, work: Path) -> None:
        self.data, self.work = data, work
        self.ledger = out / "evidence.jsonl"
        # Relative, so that no record names a folder of this machine.
        places = {"out": out, "work": work, "data": work / "data"}
        self.folders = {name: os.path.relpath(path, ROOT) for name, path in places.items()}

    def prepare(self) -> None:
        """Make the working folder, with a link to the data.

        Raises:
            ValueError: the data are not where they should be.
        """
        if self.data is None or not (self.data / "corpus").is_dir():
            raise ValueError(
                f"--data must be a folder with corpus, gsm8k, humaneval and mt_bench in it, got {self.data}"
            )
        self.work.mkdir(parents=True, exist_ok=True)
        link = self.work / "data"
        link.unlink(missing_ok=True)
        link.symlink_to(self.data.resolve(), target_is_directory=True)

    def words(self, command: str) -> list[str]:
        """Fill a command's folders in and split it into words."""
        smollm2 = {"smollm2": prepared("smollm2")} if "{smollm2}" in command else {}
        first, *rest = (word.format(**self.folders, **smollm2) for word in command.split())
        return [*PROGRAMS[first], *rest]

    def path(self, command: str) -> Path:
        """Return the file or folder that a command writes."""
        return ROOT / option(command, "--out").format(**self.folders)

    def is_done(self, command: str) -> bool:
        """Whether a command has ended well, and what it wrote is still there."""
        ended = [line["command"] for line in read_lines(self.ledger) if line["status"] == 0]
        return command in ended and self.path(command).exists()

    def is_finished(self, part: Part) -> bool:
        """Whether a part's records are complete; what was made for them on the way may be gone."""
        return all(self.is_done(command) for command in part.commands if option(command, "--out").startswith("{out}"))

    def run(self, parts: Sequence[Part]) -> int:
        """Run all commands that are not done; a part whose command fails is left, and the others are run."""
        failed, todo = [], [part for part in parts if not self.is_finished(part)]
        for number, part in enumerate(todo):
            left = todo[number:]
            say(f"{part.name} ({part.claim}); parts left: {len(left)}, {sum(one.minutes for one in left):.0f} minutes")
            if not all(self.is_done(command) or self.run_command(part.name, command) for command in part.commands):
                failed.append(part.name)
        say(f"failed: {', '.join(failed)}" if failed else "all parts are finished")
        return int(bool(failed))

    def run_command(self, name: str, command: str) -> bool:
        """Run a command and note how it went; return whether it ended well."""
        say(command)
        status, began = int(signal.SIGINT), time.monotonic()
        try:
            status = execute(self.words(command))
        finally:
            seconds = round(time.monotonic() - began, 1)
            append(self.ledger, [{"part": name, "command": command, "seconds": seconds, "status": status}])
        return status == 0


def say(text: str) -> None:
    """Print a line between the outputs of commands."""
    print(f"evidence: {text}", file=sys.stderr, flush=True)
