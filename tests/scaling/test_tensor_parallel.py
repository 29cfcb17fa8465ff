"""A model whose weights two processes share gives the texts of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers.tiny_family_models import FAMILIES, family_model
from scaling.sharded_texts import texts

from stree import TreeLM

FAMILIES_IN_CI = ("granitemoehybrid", "llama", "qwen3_5_text")
ONE_HEAD = {"gemma"}  # of keys, which two processes cannot share
ROOT = Path(__file__).parents[2]


def has_plan(name: str) -> bool:
    """Whether transformers can shard a family."""
    model = family_model(name)
    return bool(getattr(model.config, "base_model_tp_plan", None) or getattr(type(model), "_tp_plan", None))


@pytest.mark.parametrize("families", [
    pytest.param(lambda: FAMILIES_IN_CI, marks=pytest.mark.slow, id="some"),
    pytest.param(
        lambda: [name for name in FAMILIES if has_plan(name)], marks=[pytest.mark.slow, pytest.mark.exhaustive],
        id="all",
    ),
])  # fmt: skip
@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_two_processes_generate_the_texts_of_one(
    families: Callable[[], Sequence[str]], is_tied: bool, tmp_path: Path
) -> None:
    names = families()
    for name in names:
        family_model(name, tie_word_embeddings=is_tied).save_pretrained(tmp_path / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    subprocess.run(
        [*command, str(Path(__file__).with_name("sharded_texts.py")), str(tmp_path)],
        check=True, cwd=ROOT, timeout=1800, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    refused = {name for name in names if "do not divide evenly" in ranks[0][name].get("refused", "")}
    assert refused <= ONE_HEAD
    for name in names:
        if name in refused:
            continue
        alone = texts(TreeLM.from_pretrained(tmp_path / name, "cpu"), str(tmp_path / name))
        assert ranks[0][name]["sharded"] > 0
        assert [rank[name]["texts"] for rank in ranks] == [alone, alone], name


def test_plans_that_cannot_be_run_are_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tp_plan needs processes that torchrun started"):
        TreeLM.from_pretrained(tmp_path, tp_plan="auto")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotImplementedError, match="transformers has no tp_plan for mamba; give each process a model"):
        TreeLM.from_pretrained(tmp_path, tp_plan="auto")
    with pytest.raises(ValueError, match="give one of a device, a device_map and a tp_plan"):
        TreeLM.from_pretrained(tmp_path, "cpu", torch.float32, tp_plan="auto")
