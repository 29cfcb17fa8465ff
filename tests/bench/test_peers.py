"""Other libraries as they are called, and the memory of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny_pairs import tiny_pair

from stree.bench import memory
from stree.bench.execute import Case, execute
from stree.bench.methods import parse_methods
from stree.bench.peers import run_mamba_ssm, run_transformers

CPU = torch.device("cpu")


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


def test_the_peak_of_a_run_is_its_own() -> None:
    if not memory.reset_peak(CPU):
        pytest.skip("this machine does not let a process reset its peak")
    before = memory.peak_mib(CPU)
    block = torch.ones(256 << 18)  # 256 MiB: more than an allocator keeps of what other tests have freed
    assert memory.peak_mib(CPU) > before + 150
    del block
    memory.reset_peak(CPU)
    assert memory.peak_mib(CPU) < before + 32


def test_a_machine_without_peaks_gives_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "no" / "such")
    (plain,) = parse_methods("plain")
    run = execute(tiny_pair(), plain, Case(((5, 6),), 3, 0.0))
    assert run.peak_mib is None and run.ttft_s is not None and 0 < run.ttft_s < run.seconds
