"""The finished files take the place of the whole folder in one step, whenever a run is killed.

Run: python -m pytest tests/distill/test_publishing.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_pairs import SETTINGS, save_tiny

import stree
from stree.distill import distill_drafter
from stree.distill import folder as folder_module
from stree.distill.folder import RunFolder
from stree.files import exchange

TEXTS = [" ".join(f"w{1 + (start + step) % 8}" for step in range(30 + start)) for start in range(20)]
STEPS = [(Path, "rename"), (folder_module, "exchange"), (shutil, "rmtree"), (shutil, "copy2")]


def finished_run(out: Path, seed: int, *, resume: bool = False) -> RunFolder:
    """A folder whose run is about to publish a drafter of three files, one of them of this seed alone."""
    folder = RunFolder(out, resume=resume, force=not resume)
    folder.claim({"seed": seed})
    (folder.result / f"only-{seed}").mkdir(parents=True)
    files = ["config.json", "distill.json", f"only-{seed}"]
    for name in files[:2]:
        (folder.result / name).write_text(json.dumps({"seed": seed, "files": files}))
    return folder


def names(out: Path) -> set[str]:
    """What a folder holds; both of its files are of one run."""
    assert (out / "config.json").read_text() == (out / "distill.json").read_text()
    return {file.name for file in out.iterdir()}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("place", "step"), STEPS)
def test_a_run_that_is_killed_while_it_publishes_leaves_the_old_folder_or_the_new_one(
    place: Any, step: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    finished_run(out, 0).publish()
    (out / "notes.txt").write_text("mine")
    real, reached = getattr(place, step), []

    def killed(*arguments: Any, **options: Any) -> None:
        reached.append(step)
        if after:
            real(*arguments, **options)
        raise KeyboardInterrupt

    folder = finished_run(out, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, step, killed)
        folder.publish()
    assert reached
    old, new = ({"config.json", "distill.json", "notes.txt", f"only-{seed}"} for seed in (0, 1))
    found = names(out)
    assert found in (old | {"checkpoints"}, new)
    if found != new:
        finished_run(out, 1, resume=True).publish()
    finished_run(out, 0).publish()
    assert names(out) == old and (out / "notes.txt").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("why", ["working directory", "file system"])
def test_a_folder_that_cannot_be_exchanged_gets_the_files_one_by_one(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    finished_run(out, 0).publish()
    if why == "working directory":
        monkeypatch.chdir(out)
    else:
        monkeypatch.setattr(folder_module, "exchange", lambda *_: exchange(tmp_path / "none", out))
    number = out.stat().st_ino
    finished_run(out, 1).publish()
    assert {"config.json", "distill.json", "only-1"} <= names(out) and out.stat().st_ino == number
    assert json.loads((out / "config.json").read_text())["seed"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_a_run_that_is_cut_off_before_it_publishes_leaves_the_old_drafter_and_is_resumed(
    target: stree.TreeLM, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, settings = tmp_path / "out", replace(SETTINGS, steps=1, generated=0.0)
    distill_drafter(target, tokenizer, TEXTS, out, settings)

    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder_module, "exchange", cut_off)
        distill_drafter(target, tokenizer, TEXTS, out, replace(settings, seed=1), force=True)
    stree.drafters.load(str(out), target)
    assert json.loads((out / "distill.json").read_text())["settings"]["seed"] == "0"
    distill_drafter(target, tokenizer, TEXTS, out, replace(settings, seed=1), resume=True)
    assert json.loads((out / "distill.json").read_text())["settings"]["seed"] == "1"
    stree.drafters.load(str(out), target)


@pytest.mark.slow
def test_a_finished_folder_with_several_chat_templates_can_be_begun_anew(
    target: stree.TreeLM, tokenizer: Any, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=1, generated=0.0)
    tokenizer = type(tokenizer).from_pretrained(save_tiny(tmp_path / "own"))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    for seed in (0, 1):
        distill_drafter(target, tokenizer, TEXTS, tmp_path / "out", replace(settings, seed=seed), force=bool(seed))
    assert json.loads((tmp_path / "out" / "distill.json").read_text())["settings"]["seed"] == "1"
    assert not (tmp_path / "out" / "checkpoints").exists() and (tmp_path / "out" / "additional_chat_templates").is_dir()
    stree.drafters.load(str(tmp_path / "out"), target)
