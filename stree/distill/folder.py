"""The folder of one drafter: who may write into it, the checkpoints of an unfinished run, and the finished files.

``checkpoints/run.json`` marks a run that is not finished, ``distill.json`` a drafter that is.  When all finished files
are written, their folder takes the place of the whole folder.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stree.files import check_folder, exchange, failures_named, replacing

__all__ = ["METRICS", "RunFolder", "reading"]

METRICS = "distill.json"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name a file of an unfinished run that the block cannot read, as after a power cut.

    Raises:
        ValueError: it cannot.
    """
    try:
        yield
    except Exception as error:  # torch, numpy, zipfile and json each raise their own
        raise ValueError(f"{path} cannot be read: {error!r:.200}; begin anew by force") from error


class RunFolder:
    """A folder that was looked at and not yet written to.

    Args:
        path: where the drafter goes.
        resume: go on with the unfinished run that the folder holds.
        force: begin anew where the folder holds another run or drafter.

    Raises:
        ValueError: the folder holds something that neither option allows to touch, or nothing to resume.

    Attributes:
        checkpoints: folder of the unfinished run.
        resume: whether to go on with what is in there.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, force: bool = False) -> None:
        self.path, self.resume = Path(path), resume
        self.checkpoints = self.path / "checkpoints"
        self._about = self.checkpoints / "run.json"
        if resume and force:
            raise ValueError("resume goes on with a run, force begins anew: give one of them")
        check_folder(self.path)
        is_run, is_drafter = self._about.exists(), (self.path / METRICS).exists()
        if resume and not is_run:
            what = "a finished drafter" if is_drafter else "no run of stree distill"
            raise ValueError(f"{self.path} holds {what}: there is nothing to resume")
        if resume or not self.path.exists() or not any(self.path.iterdir()):
            return
        if not is_run and not is_drafter:
            raise ValueError(f"{self.path} holds files that stree distill did not make; choose another folder")
        if not force:
            what = "an unfinished run; resume it" if is_run else "a finished drafter; choose another folder"
            raise ValueError(f"{self.path} holds {what}, or begin anew by force")

    def claim(self, config: dict[str, Any]) -> None:
        """Begin a run, or go on with one of the same configuration.

        Raises:
            ValueError: the unfinished run has another configuration; it names what differs.
        """
        if self.resume:
            with reading(self._about):
                known = dict(json.loads(self._about.read_text(encoding="utf-8")))
            for key, value in json.loads(json.dumps(config)).items():
                if known.get(key) != value:
                    raise ValueError(f"{self.path} holds a run with {key} {known.get(key)!r}, got {value!r}")
            shutil.rmtree(self.result, ignore_errors=True)  # may be half written; it is made again
            return
        if self.checkpoints.exists():
            shutil.rmtree(self.checkpoints)
        self.checkpoints.mkdir(parents=True)
        with replacing(self._about) as beside:
            beside.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")

    @property
    def result(self) -> Path:
        """Where the finished files are made."""
        return self.checkpoints / "result"

    def publish(self) -> None:
        """Put the finished files in the place of the whole folder, in one step, and take the checkpoints away.

        A run that is killed at any moment leaves the old folder or the new one.  Where folders cannot be exchanged (not
        on Linux, a folder that is mounted or a working directory), files are moved one by one, config.json last: until
        it is there, the folder is no drafter.

        Raises:
            ValueError: a file cannot be written; the run can be resumed.
        """
        real, finished = self.path.resolve(), self.result
        with failures_named(self.path):
            mode = self._about.stat().st_mode  # the writer of the weights (safetensors) keeps them to itself
            for file in finished.iterdir():
                if file.is_file():
                    file.chmod(mode)
            self._keep_other_files()
            beside = real.with_name(f".{real.name}.finished")
            shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
            try:
                if Path.cwd().is_relative_to(real):
                    raise OSError(errno.EBUSY, "a working directory")
                finished = finished.rename(beside)
                exchange(finished, real)
            except OSError:
                self._move(finished)
            shutil.rmtree(beside, ignore_errors=True)

    def _keep_other_files(self) -> None:
        """Copy files that the replaced drafter does not list as its own, such as notes, to the finished ones."""
        listed = {METRICS, self.checkpoints.name}
        with suppress(OSError, ValueError, TypeError):
            listed.update(json.loads((self.path / METRICS).read_text(encoding="utf-8")).get("files", ()))
        for file in self.path.iterdir():
            if file.name in listed or (self.result / file.name).exists():
                continue
            if file.is_dir() and not file.is_symlink():
                shutil.copytree(file, self.result / file.name, symlinks=True)
            else:
                shutil.copy2(file, self.result / file.name, follow_symlinks=False)

    def _move(self, finished: Path) -> None:
        """Move finished files into the folder one by one, config.json last."""
        (self.path / "config.json").unlink(missing_ok=True)
        for file in sorted(finished.iterdir(), key=lambda file: file.name == "config.json"):
            if (self.path / file.name).is_dir():  # of the drafter that is replaced
                shutil.rmtree(self.path / file.name)
            os.replace(file, self.path / file.name)
        shutil.rmtree(self.checkpoints)
