"""Mamba-2's scan of prompts on a CPU against a recursion over tokens in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import ssd
from torch import Tensor

from stree.models.ssd_prefill import ssd_chunk_scan

CHAIN = range(-1, 99)


def _arguments(dtype: torch.dtype, decay: float) -> dict[str, Any]:
    """Two prompts of 100 tokens, more than a chunk; 4 heads in 2 groups."""
    torch.manual_seed(0)
    rows = {"hidden_states": (4, 5), "dt": (4,), "B": (2, 3), "C": (2, 3)}
    arguments: dict[str, Any] = {name: torch.randn(2, 100, *shape).to(dtype) for name, shape in rows.items()}
    arguments |= {"A": -decay * torch.rand(4), "D": torch.randn(4), "dt_bias": torch.randn(4)}
    return arguments | {"initial_states": torch.randn(2, 4, 5, 3)}


def _error(given: dict[str, Any], **changes: Any) -> float:
    """Return the largest error of outputs and last states, relative to the largest value."""
    found: Any = ssd_chunk_scan(**given | changes, chunk_size=64, dt_softplus=True, return_final_states=True)
    dt, errors = F.softplus(given["dt"].double() + given["dt_bias"].double()), list[Tensor]()
    for row in range(2):
        x, B, C, state = (given[name][row] for name in ("hidden_states", "B", "C", "initial_states"))
        output, states = ssd(x, dt[row], given["A"], B, C, list(CHAIN), state, given["D"])
        wanted = (output, states[-1])
        errors += [(one[row] - right).abs().max() / right.abs().max() for one, right in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("decay", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_and_states_are_those_of_the_recursion(dtype: torch.dtype, decay: float) -> None:
    given = _arguments(dtype, decay)
    # Inputs are rounded to the dtype before both; products are float32 for bfloat16.
    assert _error(given) < (1e-12 if dtype == torch.float64 else 1e-5)
    assert _error(given, D=None) > 1e-2
    assert decay > 1 or _error(given, initial_states=None) > 1e-4
