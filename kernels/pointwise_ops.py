"""The front door to rotary positions, gated activations and inputs of delta rules, exported by `stree.kernels.ops`.

They know no tree: every row stands by itself.
"""

from __future__ import annotations

from torch import Tensor

from stree.kernels.checks import Backend, check, check_divides, check_rank, choose, describe

ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared")


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions (RoFormer, arXiv 2104.09864), in halves.

        y[c] = x[c] cos[c] - x[c + r / 2] sin[c]                    c < r / 2
        y[c] = x[c] cos[c] + x[c - r / 2] sin[c]          r / 2 <= c < r
        y[c] = x[c]                                           r <= c

    Products and sums are float32, and the result is rounded once.

    Args:
        q: float[b, h, n, d].
        k: float[b, kv heads, n, d]; q and k may be views whose last dimension is contiguous.
        cos: float[b or 1, n, r], r even and at most d.
        sin: the same.
        backend: see `stree.kernels.ops`.

    Returns:
        q and k rotated, the same shapes and dtypes, in the memory of [b, n, h, d].

    Raises:
        ValueError: a shape, dtype or device disagrees.
    """
    check_rank("q", q, "b h n d")
    check_rank("k", k, "b h n d")
    check_rank("cos", cos, "b n r")
    batch, _, n, dim = q.shape
    check("k", k, "float", (batch, k.shape[1], n, dim), q)
    width = cos.shape[2]
    check("cos", cos, "float", (batch if cos.shape[0] != 1 else 1, n, width), q)
    check("sin", sin, "float", tuple(cos.shape), q)
    if width % 2 or width > dim:
        raise ValueError(f"cos must have an even number of columns, at most {dim}, got {width}")
    out: tuple[Tensor, Tensor] = choose("rotary", backend, q)(q, k, cos, sin)
    return out


def gated_activation(
    gate: Tensor, up: Tensor | None, *, activation: str = "silu", scale: float = 1.0, backend: Backend = "auto"
) -> Tensor:
    """Apply an activation and multiply: act(scale * gate) * up, the middle of a gated feed-forward.

    Sums and products are float32, and the result is rounded once.

    Args:
        gate: float[..., c]; gate and up may be views with a common stride between rows.
        up: float[..., c], dtype of gate, or None for the activation alone.
        activation: "silu", "gelu_tanh" (the approximation by tanh) or "relu_squared".
        scale: factor of gate.
        backend: see `stree.kernels.ops`.

    Returns:
        float[..., c], dtype of gate, contiguous.

    Raises:
        ValueError: a shape, device or activation disagrees.
    """
    if gate.ndim < 2:
        raise ValueError(f"gate must be [..., c] with at least one dimension of rows, got {describe(gate)}")
    if up is not None:
        check("up", up, "float", tuple(gate.shape), gate)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    out: Tensor = choose("gated_activation", backend, gate)(gate, up, activation=activation, scale=scale)
    return out


def delta_inputs(
    qk: Tensor,
    b: Tensor,
    a: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    key_heads: int,
    eps: float = 1e-6,
    scale: float = 1.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Make what a gated delta rule takes from what a layer projects and convolves (arXiv 2412.06464, 2510.26692).

        q = q / sqrt(|q|^2 + eps), k likewise      g = -exp(A_log) softplus(a + dt_bias)      beta = scale sigmoid(b)

    Args:
        qk: float[b, n, 2 hk dk], q and then k of all key heads; a view with contiguous channels will do.
        b: float[b, n, hv], raw betas.
        a: float[b, n, hv], raw decays; None where something else makes them (KDA).
        A_log: float[hv], with a.
        dt_bias: float[hv], with a.
        key_heads: hk.
        eps: added to squared lengths.
        scale: factor of beta; 2 where eigenvalues may be negative.
        backend: see `stree.kernels.ops`.

    Returns:
        q and k [b, n, hk, dk], g [b, n, hv] or None, beta [b, n, hv]; float32 (float64 for float64 inputs).

    Raises:
        ValueError: a shape, dtype or device disagrees, or a comes without A_log and dt_bias.
    """
    check_rank("qk", qk, "b n c")
    check_rank("b", b, "b n hv")
    batch, n, channels = qk.shape
    check_divides("2 * key_heads", 2 * key_heads, "channels of qk", channels)
    check("b", b, "float", (batch, n, b.shape[2]), qk)
    if (a is None) != (A_log is None) or (a is None) != (dt_bias is None):
        raise ValueError("a, A_log and dt_bias go together")
    if a is not None and A_log is not None and dt_bias is not None:
        check("a", a, "float", tuple(b.shape), qk)
        check("A_log", A_log, "float", (b.shape[2],), qk)
        check("dt_bias", dt_bias, "float", (b.shape[2],), qk)
    make = choose("delta_inputs", backend, qk)
    out: tuple[Tensor, Tensor, Tensor | None, Tensor] = make(
        qk, b, a, A_log, dt_bias, key_heads=key_heads, eps=eps, scale=scale
    )
    return out


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
    gated: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Run the experts that every row is routed to, and add up what they give.

        y[t] = sum over k of weights[t, k] down[e] (act(gate[e] x[t]) * (up[e] x[t]))        e = index[t, k]

    Sums are float32; the middle is rounded to the dtype of x, as the models do.  The Triton version is for the few rows
    of a tree: each expert's weights are read once for every 16 of its rows.

    Args:
        x: float[t, c].
        index: int64[t, k], different experts for each row.
        weights: float[t, k].
        up: float[experts, 2 i, c], gate above up; float[experts, i, c] without a gate.
        down: float[experts, c, i].
        activation: see `gated_activation`.
        gated: whether ``up`` holds a gate.
        backend: see `stree.kernels.ops`.

    Returns:
        float[t, c], dtype of x, contiguous.

    Raises:
        ValueError: a shape, dtype, device or activation disagrees.
    """
    check_rank("x", x, "t c")
    check_rank("index", index, "t k")
    check_rank("down", down, "experts c i")
    (rows, channels), (count, _, inner) = x.shape, down.shape
    check("index", index, "int64", (rows, index.shape[1]), x)
    check("weights", weights, "float", tuple(index.shape), x)
    check("up", up, "float", (count, inner * (2 if gated else 1), channels), x)
    check("down", down, "float", (count, channels, inner), x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    run = choose("experts", backend, x)
    out: Tensor = run(x, index, weights, up, down, activation=activation, gated=gated)
    return out
