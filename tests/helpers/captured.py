"""Targets whose decode steps are captured on the CPU, a tape in the place of CUDA graphs.

This is the one place that knows where the library keeps what it has captured and how it decides that it can.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch

import stree
from helpers.cuda_graph_tape import TapeRecorder
from helpers.on_device import treat_as_on_device
from helpers.tiny_models import patched, random_texts, tiny_model
from stree.decode import step_cache as step_cache
from stree.drafters import ModelDrafter

TEXTS = random_texts(random.Random(0), [6, 9])


def captured(monkeypatch: pytest.MonkeyPatch, lm: stree.TreeLM | None = None) -> stree.TreeLM:
    """Give a target, by default a tiny Bamba, whose steps are captured, with the operators that a device would run."""
    # A capture needs CUDA, and no option may say otherwise to a user.
    treat_as_on_device(monkeypatch)
    monkeypatch.setattr(
        step_cache, "_can_capture", lambda lm: "step_cache" in lm.cache and lm.captures_steps is not False
    )
    lm = patched(tiny_model("bamba")) if lm is None else lm
    lm.cache["step_cache"] = step_cache.StepCache(TapeRecorder)
    return lm


def has_recorder(lm: stree.TreeLM) -> bool:
    """Whether steps of a target are captured: it was given a recorder, and the user did not forbid it."""
    return "step_cache" in lm.cache and lm.captures_steps is not False


def launched() -> stree.TreeLM:
    """Give the same target, whose steps are launched one by one."""
    return patched(tiny_model("bamba"))


@cache
def near_drafter() -> ModelDrafter:
    """Give a draft model near the target, so that what it drafts is accepted often, and not always."""
    model = copy.deepcopy(tiny_model("bamba"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return ModelDrafter(stree.TreeLM(model))


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate 14 tokens after each of two short texts."""
    return stree.generate(lm, options.pop("texts", TEXTS), drafter, **{"max_new_tokens": 14, **options})
