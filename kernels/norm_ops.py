"""The front door to the norms around a tree's layers, exported by `stree.kernels.ops`.

They know no tree: every row is normalised by itself.
"""

from __future__ import annotations

from torch import Tensor

from stree.kernels.checks import Backend, check, check_divides, choose, describe


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: str = "silu",
    backend: Backend = "auto",
) -> Tensor:
    """Normalise the output of a recurrent layer by its root mean square, gated before or after.

        norm_before_gate:  y = norm(x) * weight * act(gate)       Qwen3-Next, Kimi-Linear, some Falcon-H1
        otherwise:         y = norm(x * act(gate)) * weight       Mamba-2, Bamba, Granite-4.0-H, Nemotron-H, Zamba2

    norm(v) = v / sqrt(mean(v^2) + eps) over each group of neighbouring channels.  Sums and products are float32, and
    the result is rounded once; classes that round between norm and weight differ by a unit in the last place.

    Args:
        x: float[..., c].
        gate: float[..., c]; x and gate may be views with a common stride between rows, as a projection leaves them.
        weight: float[c].
        eps: added to the mean square.
        groups: number of groups of channels; divides c.
        norm_before_gate: which of the two comes first.
        activation: "silu" or "sigmoid", of the gate.
        backend: see `stree.kernels.ops`.

    Returns:
        float[..., c], dtype of x, contiguous.

    Raises:
        ValueError: a shape, device or activation disagrees.
        NotImplementedError: backend="triton" with groups of more than 16384 channels.
    """
    _check_rows(x)
    channels = x.shape[-1]
    check("gate", gate, "float", tuple(x.shape), x)
    check("weight", weight, "float", (channels,), x)
    check_divides("groups", groups, "channels of x", channels)
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation must be 'silu' or 'sigmoid', got {activation!r}")
    norm = choose("gated_rms_norm", backend, x)
    out: Tensor = norm(
        x, gate, weight, eps=eps, groups=groups, norm_before_gate=norm_before_gate, activation=activation
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, backend: Backend = "auto") -> Tensor:
    """Normalise rows by their root mean square: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

    Sums and products are float32, and the result is rounded once.

    Args:
        x: float[..., c]; may be a view with a common stride between rows.
        weight: float[c].
        eps: added to the mean square.
        offset: added to the weight; 1 for the Gemmas, Qwen3-Next, Qwen3.5 and RecurrentGemma.
        backend: see `stree.kernels.ops`.

    Returns:
        float[..., c], dtype of x, contiguous.

    Raises:
        ValueError: a shape or device disagrees.
        NotImplementedError: backend="triton" with more than 16384 channels.
    """
    _check_rows(x)
    check("weight", weight, "float", (x.shape[-1],), x)
    out: Tensor = choose("rms_norm", backend, x)(x, weight, eps=eps, offset=offset)
    return out


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    scale: float = 1.0,
    other: Tensor | None = None,
    other_scale: float = 1.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum for the next layer.

        total = residual + scale * x + other_scale * other
        y = total / sqrt(mean(total^2) + eps) * (weight + offset)

    The sum is rounded to the dtype of the stream before it is normalised, as the models do; its terms are not.

    Args:
        x: float[..., c].
        residual: float[..., c], the stream; float32 where the model keeps it so.  Read, never written.
        weight: float[c].
        eps: added to the mean square.
        offset: added to the weight; see `rms_norm`.
        scale: factor of x, such as Granite's residual multiplier.
        other: float[..., c], what a layer computes beside x (shared and routed experts, attention and recurrence), or
            None.
        other_scale: factor of it.
        backend: see `stree.kernels.ops`.

    Returns:
        y: float[..., c], dtype of x; and total: float[..., c], dtype of residual; both contiguous.

    Raises:
        ValueError: a shape or device disagrees.
        NotImplementedError: backend="triton" with more than 16384 channels.
    """
    _check_rows(x)
    check("residual", residual, "float", tuple(x.shape), x)
    if other is not None:
        check("other", other, "float", tuple(x.shape), x)
    check("weight", weight, "float", (x.shape[-1],), x)
    norm = choose("rms_norm_add", backend, x)
    out: tuple[Tensor, Tensor] = norm(
        x, residual, weight, eps=eps, offset=offset, scale=scale, other=other, other_scale=other_scale
    )
    return out


def _check_rows(x: Tensor) -> None:
    """Require rows of channels."""
    if x.ndim < 2:
        raise ValueError(f"x must be [..., c] with at least one dimension of rows, got {describe(x)}")
