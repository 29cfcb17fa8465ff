"""``stree batch`` and ``stree.integrations.ray.Generator`` with Ray on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import stree
from stree.cli import main
from stree.integrations.ray import Generator, local_ray

pytest.importorskip("ray", reason="needs Ray: pip install 'stree[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="compares texts of the CPU")]

ROWS = 30
NEW_TOKENS = 200  # enough that a job is not over before it is killed


def prompt(number: int) -> list[int]:
    return [1 + number, 2, 3 + number, 1 + number]


def finished(out: Path) -> list[dict[str, Any]]:
    """Rows of the parts, without a torn line."""
    lines = [line for path in sorted(out.glob("part-*.jsonl")) for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in lines]


def test_a_job_of_two_workers_that_is_killed_writes_every_row_once(
    target_folder: str, target: Any, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"id": f"r{number}", "prompt": prompt(number)} for number in range(ROWS)]
    rows += [{"id": "r3", "prompt": [1]}, {"id": "empty", "prompt": ""}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "stree.cli", "batch", str(tmp_path / "rows.jsonl"), "--out", str(out)]
    command += ["--target", target_folder, "--drafter", "suffix", "--workers", "2", "--max-new-tokens", str(NEW_TOKENS)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not finished(out):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and len(finished(out)) < ROWS, "it was killed before its end"
    subprocess.run(command, check=True)
    found = finished(out)
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows[:ROWS])
    expected = stree.generate(target, [prompt(number) for number in range(ROWS)], "none", max_new_tokens=NEW_TOKENS)
    for row in found:
        number = int(row["id"][1:])
        assert row["token_ids"] == expected.sequences[number][4:], row["id"]
        assert row["finish_reason"] == expected.stats["finish_reasons"][number]
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(row["id"], row["reason"][:12]) for row in rejected] == [("r3", "an earlier r"), ("empty", "the prompt i")]
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main(command[3:]) == 0
    assert {path: path.read_bytes() for path in out.iterdir()} == before, "a finished job is left as it is"


def test_a_worker_that_fails_is_one_line_and_the_job_can_go_on(
    ray_cluster: None, target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w1"}\n')
    command = ["batch", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, "--target", target_folder, "--drafter", "suffix", "--verifier", "block"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "stree: error: a worker failed: ValueError: block verification takes trees without branches, such as Chain's; "
        "got SuffixDrafter; finished rows are kept, run it again to go on"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["job.json"]


def test_the_actor_adds_texts_to_a_pipeline_of_one_s_own(ray_cluster: None, target_folder: str, target: Any) -> None:
    import ray.data

    rows = [{"prompt": f"w{number} w2", "label": number} for number in range(3)] + [{"prompt": "", "label": 3}]
    options = {"target": target_folder, "budget": 4, "max_new_tokens": 6, "load_options": {"device": "cpu"}}
    with local_ray(1):
        found = (
            ray.data.from_items(rows)
            .map_batches(Generator, fn_constructor_kwargs=options, compute=ray.data.ActorPoolStrategy(size=1))
            .take_all()
        )
    by_label = {row["label"]: row for row in found}
    assert by_label.keys() == {0, 1, 2, 3}
    assert by_label[3]["text"] is None and by_label[3]["reason"].startswith("the prompt is empty")
    expected = stree.generate(target, [[1, 2]], "none", max_new_tokens=6).sequences[0][2:]
    assert [*by_label[1]["token_ids"]] == expected and by_label[1]["reason"] is None
