"""Memory of prefill's scans where transformers' torch functions serve them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.models.bounded_scan import scan_bytes
from stree.models.layers.base import LayerSpec
from stree.models.layers.delta_rule import DeltaSpec
from stree.models.layers.mamba1 import Mamba1Spec
from stree.models.layers.mamba2 import Mamba2Spec
from stree.models.patched_model import PatchedModel
from stree.models.prefill_functions import functions_of

__all__ = ["prefill_bytes"]

MOST_TOKENS = 1 << 20  # slices of longer texts are the same


def prefill_bytes(lm: PatchedModel, batch: int, length: int) -> int:
    """Return the most bytes of temporaries that a layer's scan makes in a prefill of ``batch`` texts of ``length``.

    Layers run one after another, so this is not a sum.  A package's function, which makes none, counts 0.
    """
    length = min(length, MOST_TOKENS)
    layers = {(type(mixer), lm.specs[site]): mixer for site, mixer in lm.mixers.items()}
    return max((_layer_bytes(mixer, spec, batch, length) for (_, spec), mixer in layers.items()), default=0)


def _layer_bytes(mixer: Any, spec: LayerSpec, batch: int, length: int) -> int:
    """Return the bytes of the temporaries of one layer's scan."""
    found = _arguments(mixer, spec, batch, length)
    if found is None:
        return 0
    name, arguments = found
    function = functions_of(type(mixer)).get(name)
    if function is None or function.serves(spec.device):
        return 0
    return scan_bytes(name, function.torch_call, **arguments)


def _arguments(mixer: Any, spec: LayerSpec, batch: int, length: int) -> tuple[str, dict[str, Any]] | None:
    """Return the name of a layer's scan and its arguments without values, or None for a layer that has none."""

    def empty(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if isinstance(spec, Mamba2Spec):
        heads = spec.nheads
        rates = {name: empty(heads, dtype=torch.float32) for name in ("A", "D", "dt_bias")}
        inputs = {"hidden_states": empty(batch, length, heads, spec.headdim), "dt": empty(batch, length, heads)}
        factors = {name: empty(batch, length, spec.ngroups, spec.dstate) for name in ("B", "C")}
        given = inputs | factors | rates
        return "mamba_chunk_scan_combined", {**given, "chunk_size": mixer.chunk_size, "dt_softplus": True}
    if isinstance(spec, DeltaSpec):
        inputs = {name: empty(batch, length, spec.heads, spec.dk) for name in ("query", "key")}
        inputs |= {"value": empty(batch, length, spec.heads, spec.dv), "beta": empty(batch, length, spec.heads)}
        inputs["g"] = empty(batch, length, spec.heads, *[spec.dk] * spec.per_channel)
        name = "chunk_kda" if spec.per_channel else "chunk_gated_delta_rule"
        return name, {**inputs, "use_qk_l2norm_in_kernel": True}
    if isinstance(spec, Mamba1Spec):
        inputs = {name: empty(batch, spec.channels, length) for name in ("hidden_states", "dt")}
        inputs |= {name: empty(batch, spec.dstate, length) for name in ("B", "C")}
        return "selective_scan_fn", inputs | {"A": empty(spec.channels, spec.dstate, dtype=torch.float32)}
    return None
