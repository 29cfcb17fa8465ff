"""A line about ``--compile`` is printed for the models that it makes faster, and for no others."""

from __future__ import annotations

import shutil

import pytest
from helpers.tiny_family_models import family_model
from helpers.tiny_models import tiny_model

from stree import TreeLM
from stree.cli import compiling


def test_only_models_that_gain_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    lm = TreeLM(tiny_model("mamba2"))
    assert "--compile" in (compiling.advice(lm) or "")
    assert compiling.advice(TreeLM(family_model("lfm2_moe"))) is None
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "MOST_BYTES", 1)
        assert compiling.advice(lm) is None
    lm.compile()
    assert compiling.advice(lm) is None
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no compiler
    assert compiling.advice(TreeLM(tiny_model("mamba2"))) is None
