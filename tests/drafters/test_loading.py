"""Drafters by name, model or checkpoint, and growths by name, in ``generate``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

import stree
from stree.drafters import FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter, load
from stree.growth import Calibrated, Chain

PROMPTS = [[5, 6, 7, 5, 6, 7], [3, 1]]


@cache
def target() -> stree.TreeLM:
    return stree.TreeLM(tiny_model("bamba"))


@cache
def draft() -> stree.TreeLM:
    return stree.TreeLM(tiny_model("mamba2"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("mamba2").save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_every_source_makes_its_drafter(folder: Path) -> None:
    kinds = {"suffix": SuffixDrafter, "none": NoDrafter, f"fused:{folder}": FusedDrafter, str(folder): ModelDrafter}
    for source, kind in kinds.items():
        assert type(load(source, target())) is kind
    for model in (folder, tiny_model("mamba2"), draft()):
        drafter = load(model, target())
        assert isinstance(drafter, ModelDrafter) and drafter.lm.dtype == target().dtype
    assert load(drafter, target()) is drafter


def test_generate_takes_what_load_takes_and_names_of_growths(folder: Path) -> None:
    expected = stree.generate(
        target(), PROMPTS, ModelDrafter(draft()), growth=Chain(3), budget=4, max_new_tokens=8, seed=1,
        sampling=stree.Sampling(0.8),
    )  # fmt: skip
    for source in (str(folder), folder, draft()):
        out = stree.generate(
            target(),
            PROMPTS,
            source,
            growth="chain:3",
            budget=4,
            max_new_tokens=8,
            seed=1,
            sampling=stree.Sampling(0.8),
        )
        assert out.sequences == expected.sequences and out.stats["growth"] == expected.stats["growth"]


def test_the_name_of_a_growth_sets_its_budget() -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 1, "sampling": stree.Sampling(0.8)}
    drafter = ModelDrafter(draft())
    expected = stree.generate(target(), PROMPTS, drafter, growth=Calibrated(2), budget=6, **options)
    out = stree.generate(target(), PROMPTS, drafter, growth="calibrated:6x2", **options)
    assert out.sequences == expected.sequences and out.stats["budget"] == 6 and expected.stats["steps"] > 1


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "name": ("sufix", ValueError, "drafter must be 'suffix', .*, got 'sufix'"),
    "number": (3, TypeError, "drafter must be .*, got 3"),
    "class": (SuffixDrafter, TypeError, "drafter must be .*, got <class"),
    "fused": ("fused", ValueError, "'fused' needs a small model: write 'fused:PATH'"),
    "mtp": ("mtp", NotImplementedError, "MTP layers are known for"),
}


@pytest.mark.parametrize(("source", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_other_sources_are_refused(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stree.generate(target(), PROMPTS, source)


def test_another_name_of_a_growth_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown growth|growth must be|'chian:3'"):
        stree.generate(target(), PROMPTS, growth="chian:3")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_of_broken_weights_is_reported_once_and_changes_no_text(
    temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("mamba2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    options: dict[str, Any] = {"sampling": stree.Sampling(temperature), "max_new_tokens": 12}
    expected = stree.generate(target(), PROMPTS * 12, "none", **options).sequences
    with caplog.at_level("WARNING", "stree"):
        out = stree.generate(target(), PROMPTS * 12, stree.TreeLM(model), growth="chain:2", budget=3, **options)
    assert out.sequences == expected and out.stats["tau"] == 1
    assert caplog.text.count("no drafted token was accepted in 9 steps: the drafter does not fit") == 1
