"""The norms that grafted layers run in one launch equal transformers' own modules, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_family_models import family_model
from torch import Tensor

from stree.kernels import checks
from stree.models import lean

GATED = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h", "olmo_hybrid",
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "zamba2",
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in GATED if family != "falcon_h1"},
    "falcon_h1-norm-before-gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "falcon_h1-norm-after-gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
}
ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}  # of the largest value; bfloat16 modules round in between


def gated_norm_of(family: str, changes: dict[str, Any]) -> Any:
    """Find the first gated norm of a family's tiny model."""
    modules = family_model(family, **changes).modules()
    return next(module for module in modules if "RMSNormGated" in type(module).__name__)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_a_gated_norm_in_one_launch_equals_the_familys_own(
    family: str, changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = gated_norm_of(family, changes).to(dtype)
    channels, draw = norm.weight.shape[0], torch.Generator().manual_seed(0)
    x, gate = (torch.randn(6, 2 * channels, generator=draw).to(dtype)[:, :channels] for _ in range(2))
    monkeypatch.setattr(checks, "has_triton", lambda op, *_: op in checks.TRITON)
    monkeypatch.setattr(type(norm), "forward", refuse)
    ours = lean.gated_norm(norm, x, gate)
    monkeypatch.undo()
    with torch.no_grad():
        theirs = norm(x[None], gate[None])[0] if "FalconH1" in type(norm).__name__ else norm(x, gate)
    assert ours.dtype == theirs.dtype
    assert float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()) < ERROR[dtype]


def refuse(*_: Any) -> Tensor:
    """Stand for a module's forward that must not run."""
    raise AssertionError("the module's own forward ran")


def test_elsewhere_the_familys_own_module_runs() -> None:
    norm = gated_norm_of("bamba", {})
    x, gate = torch.randn(2, 3, norm.weight.shape[0]), torch.randn(2, 3, norm.weight.shape[0])
    with torch.no_grad():
        assert torch.equal(lean.gated_norm(norm, x, gate), norm(x, gate))
