"""Other libraries' own generation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny_pairs import tiny_pair

from stree.bench.peers import run_mamba_ssm, run_transformers


def test_transformers_generates_ragged_prompts_as_it_does_each_alone() -> None:
    pair = tiny_pair()
    prompts = [list(range(5, 12)), [20, 21]]
    together, first = run_transformers(pair, prompts, 6, 0.0, 0)
    assert first is None  # its streamers take one prompt
    for prompt, tokens in zip(prompts, together, strict=True):
        alone, first = run_transformers(pair, [prompt], 6, 0.0, 0)
        assert alone == [tokens] and first is not None and first > 0


def test_transformers_samples_by_its_own_seed() -> None:
    pair = tiny_pair()
    runs = [run_transformers(pair, [[5, 6, 7]], 8, 1.0, seed)[0] for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def fake_pair(source: Path) -> Any:
    """A pair whose target says that it lies on a GPU."""
    target = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float32)
    return SimpleNamespace(target=target, source=str(source), dtype="float32")


def test_mamba_ssm_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="mamba-ssm needs a CUDA device"):
        run_mamba_ssm(tiny_pair(), [[1]], 4, 0.0, 0)
    monkeypatch.setitem(sys.modules, "mamba_ssm.models.mixer_seq_simple", None)
    with pytest.raises(NotImplementedError, match="mamba-ssm is not installed"):
        run_mamba_ssm(fake_pair(tmp_path), [[1]], 4, 0.0, 0)
    loaded = SimpleNamespace(MambaLMHeadModel=SimpleNamespace(from_pretrained=lambda *_, **__: "model"))
    monkeypatch.setitem(sys.modules, "mamba_ssm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mamba_ssm.models", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mamba_ssm.models.mixer_seq_simple", loaded)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    with pytest.raises(NotImplementedError, match="mamba-ssm loads checkpoints of its own format; '.*' is none"):
        run_mamba_ssm(fake_pair(tmp_path), [[1]], 4, 0.0, 0)
    (tmp_path / "config.json").write_text(json.dumps({"ssm_cfg": {"layer": "Mamba2"}}))
    with pytest.raises(NotImplementedError, match="prompts of one length only; use --batch-size 1"):
        run_mamba_ssm(fake_pair(tmp_path), [[1], [1, 2]], 4, 0.0, 0)
