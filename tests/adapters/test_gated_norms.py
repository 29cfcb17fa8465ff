"""Gated norms of recurrent layers in one launch equal the family's module, which runs everywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from helpers.on_device import treat_as_on_device
from helpers.tiny_family_models import family_model
from torch import Tensor, nn

from stree.kernels import dispatch
from stree.models.fused import fused_layers
from stree.models.patching import is_patched, unpatch_forward

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


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    """Score trees with fused layers."""
    with fused_layers.fused_scope(fused_layers.FUSED):
        yield


def gated_norm_of(family: str, changes: dict[str, Any]) -> Any:
    """Find the first gated norm of a family's tiny model."""
    modules = family_model(family, **changes).modules()
    return next(module for module in modules if "RMSNormGated" in type(module).__name__)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_a_gated_norm_in_one_launch_equals_that_of_the_family(
    family: str, changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = gated_norm_of(family, changes).to(dtype)
    channels, draw = norm.weight.shape[0], torch.Generator().manual_seed(0)
    x, gate = (torch.randn(6, 2 * channels, generator=draw).to(dtype)[:, :channels] for _ in range(2))
    treat_as_on_device(monkeypatch, host_can_read=True, operations=dispatch.TRITON)
    fused_layers.patch_fused_layers(norm)
    monkeypatch.setattr(type(norm), "forward", refuse)
    fused = norm(x, gate)
    monkeypatch.undo()
    unpatch_forward(norm)
    with torch.no_grad():
        unfused = norm(x[None], gate[None])[0] if "FalconH1" in type(norm).__name__ else norm(x, gate)
    assert fused.dtype == unfused.dtype
    assert float((fused.float() - unfused.float()).abs().max() / unfused.float().abs().max()) < ERROR[dtype]


class WholeRows(torch.nn.Module):
    """A gated norm as transformers 5.17 has it, which names no groups."""

    def __init__(self, size: int, power: float = 1.0) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 2, size)), 1e-3
        self.power = power

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states * torch.nn.functional.silu(gate) ** self.power
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def test_a_gated_norm_without_groups_is_recognised_by_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squared(WholeRows):
        """Another function under the same names."""

    x, gate = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    treat_as_on_device(monkeypatch, host_can_read=True, operations=dispatch.TRITON)
    norm, other = WholeRows(16), Squared(16, 2.0)
    with torch.no_grad():
        expected = norm(x, gate)
        fused_layers.patch_fused_layers(nn.ModuleList((norm, other)))
        assert is_patched(norm) and not is_patched(other)
        monkeypatch.setattr(WholeRows, "forward", refuse)
        torch.testing.assert_close(norm(x, gate), expected)


def refuse(*_: Any, **__: Any) -> Tensor:
    """Fail where a module's forward must not run."""
    raise AssertionError("the module's own forward ran")


@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_a_class_that_computes_something_else_runs_as_a_module(family: str, changes: dict[str, Any]) -> None:
    norm = gated_norm_of(family, changes)

    class Doubled(type(norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states, gate)  # type: ignore[no-any-return]

    norm.__class__ = Doubled
    fused_layers.patch_fused_layers(norm)
    assert not is_patched(norm)


@pytest.mark.parametrize("change", ["reference", "forward", "fetched", "hook", "hook of all modules", "fused_layers"])
def test_the_familys_module_runs_where_there_is_the_reference_only_and_what_was_set_later_stays(
    change: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(dispatch, "has_own", lambda *_: change != "reference")
    norm = gated_norm_of("bamba", {})
    x, gate = torch.randn(2, 3, norm.weight.shape[0]).unbind()
    with torch.no_grad():
        expected = norm(x, gate)
        fused_layers.patch_fused_layers(norm)
        if change == "forward":
            norm.forward = lambda x, gate: x + gate
            expected = x + gate
        elif change == "fetched":  # for each call, by accelerate
            unpatch_forward(norm)
            weights = {"weight": norm.weight.detach().clone()}
            add_hook_to_module(norm, AlignDevicesHook("cpu", offload=True, weights_map=weights))
            fused_layers.patch_fused_layers(norm)
            assert norm.weight.device.type == "meta" and is_patched(norm)
        elif change == "hook":
            norm.register_forward_hook(lambda _, __, y: 2 * y)
            expected = 2 * expected
        elif change == "hook of all modules":
            hook = nn.modules.module.register_module_forward_hook(lambda _, __, y: 2 * y)
            request.addfinalizer(hook.remove)
            expected = 2 * expected
        with fused_layers.fused_scope(() if change == "fused_layers" else fused_layers.FUSED):
            error = 1e-5 if "hook" in change else 0
            torch.testing.assert_close(norm(x, gate), expected, rtol=error, atol=error)
