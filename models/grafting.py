"""What every adapter does in the same way: override a module's forward, make room for states, take over a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.models.forwards import own_forward, put_forward
from stree.models.lean import waiting
from stree.models.state import TreeStep

__all__ = ["Zeros", "graft_forward", "take_window"]


def graft_forward(
    module: Any, tree_forward: Callable[..., Any], plain_forward: Callable[..., Any] | None = None
) -> None:
    """Make a module score trees where a ``TreeStep`` stands among the arguments that it is called with.

    Args:
        module: a part of a transformers model.
        tree_forward: called as ``tree_forward(module, step, *args, **kwargs)`` with the step that was found.
        plain_forward: called as ``plain_forward(module, own, *args, **kwargs)`` where there is no step, ``own`` being
            the module's own forward; None for just that.
    """
    put_forward(module, _forward, tree_forward, plain_forward)


def _forward(
    module: Any, before: Any, tree_forward: Callable[..., Any], plain_forward: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Score a tree if there is one."""
    step = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeStep)), None)
    if step is not None:
        return waiting(tree_forward(module, step, *args, **kwargs))
    own = own_forward(module, before)
    return own(*args, **kwargs) if plain_forward is None else plain_forward(module, own, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Makes zeroed tensors for a stack of layers.

    Attributes:
        leading: sizes that every tensor begins with: layers and sequences.
        dtype: of the tensors unless told otherwise.
        device: of the tensors.
    """

    leading: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Make a tensor [*leading, *shape]."""
        return torch.zeros(*self.leading, *shape, dtype=dtype or self.dtype, device=self.device)


def take_window(window: Tensor, cache_layer: Any) -> None:
    """Copy the newest inputs that a transformers cache layer keeps of a convolution into float[batch, c, width - 1]."""
    inputs = cache_layer.conv_states[0]
    window.copy_(inputs[..., inputs.shape[-1] - window.shape[-1] :])
