"""Hidden states of named layers, recorded while a call runs the model.

The layers and the final norm of a model are patched, by the first call that asks, to note what they are called with if
the current call asked for it.  A call's recorder is a context variable, so that threads do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from stree.models.fused.lazy_residual import LazyResidual
from stree.models.patching import unpatched_forward, wrap_forward

__all__ = ["FINAL_NORM", "check_hidden_layers", "check_hidden_size", "patch_for_recording", "recording", "stacked"]

FINAL_NORM = -1  # as in transformers' hidden_states[-1]

_recorded: ContextVar[dict[int, Any] | None] = ContextVar("recorded", default=None)


def check_hidden_layers(layers: Sequence[int] | None, num_layers: int) -> None:
    """Refuse layers that a model does not have.

    Raises:
        ValueError: none is named, or one outside the range.
    """
    if layers is not None and not (
        isinstance(layers, Sequence)
        and len(layers)
        and all(isinstance(layer, int) and FINAL_NORM <= layer <= num_layers for layer in layers)
    ):
        raise ValueError(
            f"hidden_layers must be integers from 0, the embeddings, to {num_layers}, the last layer, or {FINAL_NORM} "
            f"for the output of the final norm; got {layers}"
        )


def check_hidden_size(hidden_size: int, model: Any, head: str = "draft head") -> None:
    """Refuse a draft head that was made for hidden states of another size than a model's.

    Raises:
        ValueError: it was.
    """
    own = model.get_input_embeddings().weight.shape[1]
    if hidden_size != own:
        raise ValueError(f"{head} must have hidden_size {own}, the target's, got {hidden_size}")


def patch_for_recording(model: Any) -> None:
    """Make the layers and the final norm of a model note their inputs, and the norm its output; once is enough."""
    base = model.get_decoder()  # of the model that a PeftModel wraps, too
    for index, layer in enumerate(base.layers):
        wrap_forward(layer, _layer_forward, index)
    norm = [child for name, child in base.named_children() if "norm" in name][-1]
    wrap_forward(norm, _final_norm_forward, len(base.layers))


@contextmanager
def recording(layers: Sequence[int]) -> Iterator[dict[int, Any]]:
    """Record hidden states while the model runs inside; the dict is filled by layer."""
    recorded: dict[int, Any] = dict.fromkeys(layers)
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


def stacked(recorded: dict[int, Any], layers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stack what was recorded: float[batch, n, len(layers), hidden_size]; norms have evaluated lazy residuals."""
    tensors = (recorded[layer] for layer in layers)
    values = (value.value if isinstance(value, LazyResidual) else value for value in tensors)
    return torch.stack([value.to(device, dtype) for value in values], dim=2)


def _layer_forward(layer: Any, inner: Any, index: int, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer; note its input."""
    _record(index, hidden_states)
    return unpatched_forward(layer, inner)(hidden_states, *args, **kwargs)


def _final_norm_forward(norm: Any, inner: Any, index: int, hidden_states: Any) -> Any:
    """Run the final norm; note its input and its output."""
    _record(index, hidden_states)
    out = unpatched_forward(norm, inner)(hidden_states)
    _record(FINAL_NORM, out)
    return out


def _record(layer: int, hidden_states: Any) -> None:
    """Note hidden states if the current call asked for them."""
    recorded = _recorded.get()
    if recorded is not None and layer in recorded:
        recorded[layer] = hidden_states
