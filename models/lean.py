"""Gated norms of recurrent layers in one launch, where transformers' modules take about ten."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stree.kernels import checks, ops

__all__ = ["gated_norm"]


def gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Normalise and gate float[..., c] rows as ``norm``, a gated RMSNorm of transformers, does.

    Where the Triton versions run, it is they who do it; elsewhere, and for a class with other facts than those that are
    known, it is the module's own forward.
    """
    if not checks.has_triton("gated_rms_norm", x.device, x.dtype):
        return norm(x, gate)  # type: ignore[no-any-return]
    if hasattr(norm, "group_size"):  # Mamba-2, Bamba, Granite-4.0-H, Nemotron-H, Zamba2
        facts: dict[str, Any] = {"groups": x.shape[-1] // norm.group_size}
    elif hasattr(norm, "n_groups"):  # Falcon-H1
        facts = {"groups": norm.n_groups, "norm_before_gate": norm.norm_before_gate}
    elif getattr(norm, "activation", None) in ("silu", "sigmoid"):  # the delta rules
        facts = {"norm_before_gate": True, "activation": norm.activation}
    else:
        return norm(x, gate)  # type: ignore[no-any-return]
    return ops.gated_rms_norm(x, gate, norm.weight, eps=norm.variance_epsilon, **facts)
