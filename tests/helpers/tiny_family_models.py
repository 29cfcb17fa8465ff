"""A tiny model of every family, with weights under which states matter; skips families that transformers lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from helpers import tiny_families, tiny_families_delta
from helpers.fast_cases import slow_unless

BUILDERS = {**tiny_families.BUILDERS, **tiny_families_delta.BUILDERS}
FAMILIES = sorted(BUILDERS)
# Together they hold a layer of every kind.
EVERY_ADAPTER = (
    "gemma3_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "minimax",
    "qwen3_next",
    "recurrent_gemma",
    "zamba",
    "zamba2",
)

# Families with experts: in bfloat16 a near-tie of the router may go either way, which changes the logits of a token.
ROUTED = {
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
}


def matrix(
    families: Sequence[str] = FAMILIES, fast: Sequence[str] = EVERY_ADAPTER, in_ci: Sequence[str] = FAMILIES
) -> list[Any]:
    """Return families as parameters of a test.

    Those outside ``fast``, which has one for each adapter, are slow; those outside ``in_ci`` exhaustive, too.
    """
    return slow_unless(fast.__contains__, families, in_ci=in_ci.__contains__)


def built(model_type: str, **changes: object) -> PreTrainedModel:
    """Make a model with transformers' own random weights."""
    try:
        return BUILDERS[model_type](**changes)
    except AttributeError as error:
        if "has no attribute" in str(error) and "transformers" in str(error):
            pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
        raise


def family_model(
    model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Make an unpatched model; the same arguments return the same weights."""
    torch.manual_seed(seed)
    model = built(model_type, **changes)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products do not take float64
    draw_weights(model)
    return model.eval().to(dtype)


@torch.no_grad()
def draw_weights(model: PreTrainedModel) -> None:
    """Make matrices wide, vectors uneven, step sizes large and decays slow, or a state is forgotten at once."""
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "A_log":
            parameter.copy_(torch.rand(parameter.shape) * 3 - 3)
        elif last in ("dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
            parameter.copy_(torch.rand(parameter.shape) * 3 - 2)
        elif parameter.dim() >= 2:
            parameter.mul_(2.5)
        else:
            parameter.add_(0.1 * torch.randn(parameter.shape))
