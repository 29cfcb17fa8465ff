"""Every public operation on token trees: signature, meaning and shapes.

Axes: b batch, n nodes, h heads, g groups, p headdim, s dstate, c channels, w filter width, m entries of a path, N nodes
that a stash has room for.  A tensor is of any floating dtype unless said otherwise; "wide x" is float32, or float64
where x is.  Outputs have the dtype of x, q or v and are contiguous; accumulation, decays and states are float32
(float64 where the inputs are float64).

Common to all operations:

- `parents` is int32[b, n] or, better, a `Topology` made once a step.  parents[:, 0] == -1, parents[:, i] < i; a -1 at
  i > 0 marks padding, whose outputs are finite but mean nothing.
- `first=k`: only rows k.. are computed and returned; inputs still hold all n nodes where their shape says n.
- `path` is int32[b, m], accepted nodes from the root down, with `path_lengths` int32[b], their number, root included;
  or an `AcceptedPath` made once a step (then `path_lengths` is None).  Entries past a length are ignored; length 0
  leaves that sequence bit for bit as it was.
- Scans read `state`, which is that before the root, and never write it; commits write in place and treat the batch as
  so many independent rows, so the layers of a model may be stacked into it.
- A `*_step` is exactly: commit of `path` from the stash (skipped when `path` is None), copy of the new rows
  first..n - 1 into the stash, scan of stash rows 0..n - 1.  Rows below `first` are in the stash from earlier calls.
- `previous`: a second stash that `path` is committed from, read only; None: the stash itself.  A caller who alternates
  between two saves the Triton version a launch.
- `x` of a scan: inputs after the convolution.  `dt`: step sizes after bias, softplus and limit, positive and finite.
  `A` is negative.  `D` is None for no skip term.  `dt_bias` is None where the projection has added it.
- Steps write their stashes, and their states where there is a path; `x`, `xbc`, `k`, ... are then new rows and `dt`
  as projected.
- `backend`: "reference", "triton" or "auto" (Triton for CUDA tensors where that operation has a Triton version, a
  version for the CPU where it has one and the host can read the tensors, else the reference).  "triton" never falls
  back; it takes tensors of which at least the last dimension is contiguous, of states, windows and matrices the last
  ones, and names one that is not.

Shapes, dtypes and devices are checked always, before anything is written; values (order of parents) only for bare CPU
tensors, or everywhere under STREE_DEBUG=1: a layer never synchronises with a device.  A shape, device,
parent or value that disagrees raises ValueError, a dtype TypeError, backend="triton" where it cannot run RuntimeError,
and sizes that the Triton version has no tiles for NotImplementedError.
"""

# The decorator takes the place of the bodies.
# mypy: disable-error-code="empty-body, return"

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.checks import Parents, Path, check
from stree.kernels.dispatch import TRITON, Backend
from stree.kernels.sampling.reference import MatchedPath
from stree.kernels.shapes import operation
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "ACTIVATIONS", "TRITON", "AcceptedPath", "Backend", "MatchedPath", "Parents", "Path", "Topology",
    "attention_step", "choice", "conv_commit", "conv_step", "delta_inputs", "diagonal_commit", "diagonal_step",
    "diagonal_tree_scan", "draw_distinct", "experts", "gated_activation", "gated_delta_commit", "gated_delta_step",
    "gated_delta_tree_scan", "gated_rms_norm", "kv_commit", "mamba2_step", "match_accept", "philox_uniform", "rms_norm",
    "rms_norm_add", "rotary", "selective_commit", "selective_step", "selective_tree_scan", "ssd_commit", "ssd_step",
    "ssd_tree_scan", "tree_attention", "tree_conv1d",
]  # fmt: skip

ACTIVATIONS = ("silu", "gelu_tanh", "relu_squared")  # of `gated_activation` and `experts`


# Mamba-2, lightning attention: a matrix state per head.


@operation(
    "mamba2.kernel", "g divides h",
    x="b n h p", dt="b n h", A="h", B="b n g s", C="b n g s", state="b h p s: wide x", D="h?",
)  # fmt: skip
def ssd_tree_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, parents: Parents, state: Tensor, *,
    D: Tensor | None = None, first: int = 0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Run the Mamba-2 recurrence along every root-to-node path of a token tree.

    Node i continues its parent, not node i - 1 (Mamba-2, arXiv 2405.21060; on trees STree, arXiv 2505.14969):

        S[i] = exp(dt[i] * A) * S[parent of i] + dt[i] * x[i] B[i]^T        S[-1] = state
        y[i] = S[i] C[i] + D * x[i]

    A chain, parents = [-1, 0, 1, ...], gives the ordinary sequential scan.

    Returns:
        y, float[b, n - first, h, p].
    """


@operation(
    "mamba2.kernel", "g divides h", cpu="mamba2.cpu",
    state="b h p s: wide x", x="b n h p", dt="b n h", A="h | b h", B="b n g s",
)  # fmt: skip
def ssd_commit(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, path: Path, path_lengths: Tensor | None, *,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Commit the accepted path of a Mamba-2 layer to its state, in place, in closed form; A is [b, h] for a stack."""


@operation(
    "mamba2.kernel", "g divides h", "n <= N", cpu="mamba2.cpu",
    state="b h p s: wide xbc", stash_xbc="b N h*p+2*g*s", stash_dt="b N h: wide xbc", xbc="b n-first h*p+2*g*s",
    dt="b n-first h", A="h", dt_bias="h?", headdim="= p", ngroups="= g", D="h?",
    previous=("b F h*p+2*g*s", "b F h: wide xbc"),
)  # fmt: skip
def ssd_step(
    state: Tensor, stash_xbc: Tensor, stash_dt: Tensor, path: Path | None, path_lengths: Tensor | None, xbc: Tensor,
    dt: Tensor, A: Tensor, dt_bias: Tensor | None, parents: Parents, *, headdim: int, ngroups: int,
    D: Tensor | None = None, dt_limit: tuple[float, float] = (0.0, float("inf")), first: int = 0,
    previous: tuple[Tensor, Tensor] | None = None, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Commit the last path of a Mamba-2 layer, stash the new rows, scan the new tree.

    Args:
        stash_xbc: rows after the convolution: x, then B, then C.
        stash_dt: step sizes after bias, softplus and limit.
        dt_limit: bounds of the step size after softplus.

    Returns:
        y, float[b, n - first, h, p], dtype of stash_xbc.
    """


@operation(
    "mamba2.kernel", "g divides h", "n <= N", cpu="mamba2.cpu",
    window="b h*p+2*g*s w-1", stash_conv="b N h*p+2*g*s", weight="h*p+2*g*s w", conv_bias="h*p+2*g*s?",
    state="b h p s: wide xbc", stash_xbc="b N h*p+2*g*s", stash_dt="b N h: wide xbc", xbc="b n-first h*p+2*g*s",
    dt="b n-first h", A="h", dt_bias="h?", headdim="= p", ngroups="= g", D="h?",
    previous=("b F h*p+2*g*s", "b F h: wide xbc"), gating=("b n-first h*p", "h*p"),
)  # fmt: skip
def mamba2_step(
    window: Tensor, stash_conv: Tensor, weight: Tensor, conv_bias: Tensor | None, state: Tensor, stash_xbc: Tensor,
    stash_dt: Tensor, path: Path | None, path_lengths: Tensor | None, xbc: Tensor, dt: Tensor, A: Tensor,
    dt_bias: Tensor | None, parents: Parents, *, headdim: int, ngroups: int, D: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")), first: int = 0,
    previous: tuple[Tensor, Tensor] | None = None, gating: tuple[Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Do what a Mamba-2 mixer does between its projections, in one launch for trees of up to 16 nodes.

    That is `conv_step` with SiLU but without its commit, `ssd_step`, and the first half of `gated_rms_norm`:

        gated = y * silu(gate)          y of this operation: gated * norm_weight

    The factor 1 / sqrt(mean(gated^2) + eps) of each row commutes with the projection that follows; `rms_norm_add`
    multiplies by it.

    Args:
        window: inputs of the convolution before the root, with `path` already, unlike `state`; read, never written.
        stash_conv: rows before the convolution.
        xbc: new rows before the convolution.
        gating: the gate of the new rows, with the strides of xbc, and the norm's weight; None for y as it is.

    Returns:
        y, float[b, n - first, h, p], dtype of stash_xbc; and with `gating` parts of the sum of gated^2 over each row,
        float32[b, n - first, k], where k depends on the version.
    """


# Gated DeltaNet, KDA: a matrix state per head whose writes erase first.


@operation(
    "delta_rule.kernel", "hk divides hv", "U >= first",
    q="b n hk dk", k="b n hk dk", v="b n hv dv", g="b n hv | b n hv dk", beta="b n hv", state="b hv dk dv: wide v",
    u="b U hv dv?",
)  # fmt: skip
def gated_delta_tree_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parents: Parents, state: Tensor, *,
    scale: float | None = None, first: int = 0, u: Tensor | None = None, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the gated delta rule (gated DeltaNet, KDA) along every root-to-node path of a token tree.

    Every node erases what its key reads, then writes (gated DeltaNet, arXiv 2412.06464; KDA, arXiv 2510.26692):

        u[i] = beta[i] * (v[i] - S'^T k[i])      S' = exp(g[i]) * S[parent of i],  S[-1] = state
        S[i] = S' + k[i] u[i]^T                  o[i] = scale * S[i]^T q[i]

    Args:
        q: normalised, as k is.
        g: log decays, at most 0 and finite; with four dimensions one per key channel.
        beta: in [0, 2].
        scale: factor on the outputs; dk ** -0.5 if None.
        u: u of the rows below `first` from earlier calls; rows from `first` on are ignored.  None: solved again.

    Returns:
        o, float[b, n - first, hv, dv], dtype of v; and u, float32[b, n, hv, dv], what a commit needs.
    """


@operation(
    "delta_rule.kernel", "hk divides hv",
    state="b hv dk dv: wide k", k="b n hk dk", u="b n hv dv", g="b n hv | b n hv dk",
)  # fmt: skip
def gated_delta_commit(
    state: Tensor, k: Tensor, u: Tensor, g: Tensor, path: Path, path_lengths: Tensor | None, *,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Commit the accepted path of a gated delta layer to its state, in place, in closed form; u is the scan's."""


@operation(
    "delta_rule.kernel", "hk divides hv", "n <= N", cpu="delta_rule.cpu",
    state="b hv dk dv: wide v", stash_k="b N hk dk", stash_u="b N hv dv", stash_g="b N hv | b N hv dk",
    q="b n-first hk dk", k="b n-first hk dk", v="b n-first hv dv", g="b n-first hv | b n-first hv dk",
    beta="b n-first hv", previous=("b F hk dk", "b F hv dv", "b F hv | b F hv dk"),
)  # fmt: skip
def gated_delta_step(
    state: Tensor, stash_k: Tensor, stash_u: Tensor, stash_g: Tensor, path: Path | None, path_lengths: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parents: Parents, *,
    scale: float | None = None, first: int = 0, previous: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Commit the last path of a gated delta layer, stash the new rows, scan the new tree, stash its u.

    The arguments are those of `gated_delta_tree_scan`, new rows only.

    Returns:
        o, float[b, n - first, hv, dv], dtype of v.
    """


# Mamba-1 and RG-LRU: a diagonal state.


@operation(
    "diagonal.kernel",
    x="b n c", dt="b n c", A="c s", B="b n s", C="b n s", state="b c s: wide x", D="c?",
)  # fmt: skip
def selective_tree_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, parents: Parents, state: Tensor, *,
    D: Tensor | None = None, first: int = 0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Run the Mamba-1 recurrence along every root-to-node path of a token tree.

    The state is diagonal, with a decay for every channel and state (Mamba, arXiv 2312.00752):

        h[i] = exp(dt[i] * A) * h[parent of i] + dt[i] * x[i] * B[i]        h[-1] = state
        y[i] = h[i] C[i] + D * x[i]

    Every ancestor is needed to compute a row, so `first` saves only the reading of the states.

    Returns:
        y, float[b, n - first, c].
    """


@operation("diagonal.kernel", state="b c s: wide x", x="b n c", dt="b n c", A="c s | b c s", B="b n s")
def selective_commit(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, path: Path, path_lengths: Tensor | None, *,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Commit the accepted path of a Mamba-1 layer to its state, in place, in closed form; a stack has A [b, c, s]."""


@operation(
    "diagonal.kernel", "n <= N", cpu="diagonal.cpu",
    state="b c s: wide x", stash_x="b N c", stash_dt="b N c: wide x", stash_B="b N s", x="b n-first c",
    dt="b n-first c", A="c s", B="b n-first s", C="b n-first s", dt_bias="c?", D="c?",
    previous=("b F c", "b F c: wide x", "b F s"),
)  # fmt: skip
def selective_step(
    state: Tensor, stash_x: Tensor, stash_dt: Tensor, stash_B: Tensor, path: Path | None, path_lengths: Tensor | None,
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, parents: Parents, *,
    D: Tensor | None = None, first: int = 0, previous: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Commit the last path of a Mamba-1 layer, stash the new rows, scan the new tree.

    `stash_dt` holds step sizes after bias and softplus.

    Returns:
        y, float[b, n - first, c], dtype of stash_x.
    """


@operation("diagonal.kernel", log_a="b n c", x="b n c", state="b c: wide x")
def diagonal_tree_scan(
    log_a: Tensor, x: Tensor, parents: Parents, state: Tensor, *, first: int = 0, backend: Backend = "auto"
) -> Tensor:
    """Run a diagonal recurrence (RG-LRU, Griffin, arXiv 2402.19427) along every root-to-node path of a token tree.

        h[i] = exp(log_a[i]) * h[parent of i] + x[i]        h[-1] = state        log_a <= 0

    Every ancestor is needed to compute a row, so `first` saves nothing here.

    Returns:
        h, float[b, n - first, c].
    """


@operation("diagonal.kernel", state="b c: wide x", log_a="b n c", x="b n c")
def diagonal_commit(
    state: Tensor, log_a: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None, *, backend: Backend = "auto"
) -> None:
    """Commit the accepted path of a diagonal recurrence to its state, in place, in closed form."""


@operation(
    "diagonal.kernel", "n <= N",
    state="b c: wide x", stash_log_a="b N c", stash_x="b N c", log_a="b n-first c", x="b n-first c",
)  # fmt: skip
def diagonal_step(
    state: Tensor, stash_log_a: Tensor, stash_x: Tensor, path: Path | None, path_lengths: Tensor | None, log_a: Tensor,
    x: Tensor, parents: Parents, *, first: int = 0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Commit the last path of a diagonal recurrence, stash the new rows, scan the new tree.

    Returns:
        h, float[b, n - first, c], dtype of stash_x.
    """


# The short convolution before a recurrence.


@operation("conv.kernel", x="b n c", weight="c w", bias="c?", window="b c w-1", activation="one of silu, None")
def tree_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, parents: Parents, window: Tensor, *,
    activation: str | None = "silu", first: int = 0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Apply a causal depthwise convolution along every root-to-node path.

    Node i reads itself, its last w - 1 ancestors and, above the root, the stored window, newest column last.

    Args:
        x: inputs before the convolution.
        weight: last tap on the node itself.
        window: inputs before the root; read, never written.
        activation: "silu" or None.

    Returns:
        y, float[b, n - first, c].
    """


@operation("conv.kernel", cpu="conv.cpu", window="b c t", x="b n c")
def conv_commit(
    window: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None, *, backend: Backend = "auto"
) -> None:
    """Move the accepted rows of x, inputs before a convolution of t + 1 taps, into its window, in place."""


@operation(
    "conv.kernel", "n <= N", cpu="conv.cpu",
    window="b c w-1", stash="b N c", x="b n-first c", weight="c w", bias="c?",
    activation="one of silu, None",
)  # fmt: skip
def conv_step(
    window: Tensor, stash: Tensor, path: Path | None, path_lengths: Tensor | None, x: Tensor, weight: Tensor,
    bias: Tensor | None, parents: Parents, *, activation: str | None = "silu", first: int = 0,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Commit the last path to the window, stash the new rows before the convolution, convolve the new tree.

    Returns:
        y, float[b, n - first, c], dtype of stash.
    """


# Attention.


@operation(
    "attention.kernel", "hk divides hq",
    q="b n-first hq d", k_cache="b hk L d", v_cache="b hk L dv", lengths="b: int32", k="b n hk d", v="b n hk dv",
)  # fmt: skip
def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, k: Tensor, v: Tensor, parents: Parents, *,
    scale: float, window: int | None = None, softcap: float | None = None, first: int = 0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Attend from every node to the cached context and to its own ancestors, itself included.

    Node i is at position lengths + depth of i.  Rotary or other positions are the caller's, already in q, k and
    the cache.  Cache rows from lengths on are not attended to but must be finite (caches start as zeros).

    Args:
        k_cache: pass a view narrowed to the rows in use.
        lengths: rows of the cache in use.
        scale: factor on the scores, d ** -0.5 as a rule.
        window: a node attends to positions above its own minus window; None for all.
        softcap: scores become softcap * tanh(scores / softcap); None for as they are.

    Returns:
        float[b, n - first, hq, dv], dtype of q; softmax in float32.
    """


@operation(
    "attention.append", "b divides r", bare_path=True, cpu="attention.cpu",
    k_cache="r hk L d", v_cache="r hk L dv", lengths="b: int32", k="r n hk d", v="r n hk dv",
)  # fmt: skip
def kv_commit(
    k_cache: Tensor, v_cache: Tensor, lengths: Tensor, k: Tensor, v: Tensor, path: Path, path_lengths: Tensor | None, *,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Append the accepted rows of K and V to the caches at `lengths`, in place; `lengths` itself is not advanced.

    The r rows of the caches are b sequences of r / b layers, layer after layer; lengths and paths are those of the
    sequences.  Nothing is written past the end of a cache, nor for an empty path.
    """


@operation(
    "attention.kernel", "hk divides hq", "n <= N", cpu="attention.cpu",
    k_cache="b hk L d", v_cache="b hk L dv", lengths="b: int32", stash_k="b N hk d", stash_v="b N hk dv",
    q="b n-first hq d", k="b n-first hk d", v="b n-first hk dv",
)  # fmt: skip
def attention_step(
    k_cache: Tensor, v_cache: Tensor, lengths: Tensor, stash_k: Tensor, stash_v: Tensor, path: Path | None,
    path_lengths: Tensor | None, q: Tensor, k: Tensor, v: Tensor, parents: Parents, *,
    scale: float, window: int | None = None, softcap: float | None = None, first: int = 0, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Append the last path's K and V to the caches, stash those of the new rows, attend from the new tree.

    `lengths` is the length *after* the commit of the path, which writes rows lengths - path_lengths .. lengths - 1; it
    is read, never written.  For `scale`, `window` and `softcap` see `tree_attention`.

    Returns:
        float[b, n - first, hq, dv], dtype of q.
    """


# Norms between layers.  From here on rows are independent and no operation takes a tree.  A tensor may be a view with a
# common stride between rows.  Sums and products are float32, and results are rounded once.


@operation(
    "fused.norm", "groups divides c", cpu="fused.cpu",
    x="... n c", gate="... n c", weight="c", activation="one of silu, sigmoid",
)  # fmt: skip
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1, norm_before_gate: bool = False,
    activation: str = "silu", backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Normalise the output of a recurrent layer by its root mean square, gated before or after.

        norm_before_gate:  y = norm(x) * weight * act(gate)       Qwen3-Next, Kimi-Linear, some Falcon-H1
        otherwise:         y = norm(x * act(gate)) * weight       Mamba-2, Bamba, Granite-4.0-H, Nemotron-H, Zamba2

    norm(v) = v / sqrt(mean(v^2) + eps) over each of `groups` groups of neighbouring channels; act is "silu" or
    "sigmoid".  Classes that round between norm and weight differ by a unit in the last place.
    """


@operation("fused.norm", cpu="fused.cpu", x="... n c", weight="c")
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, backend: Backend = "auto") -> Tensor:
    """Normalise rows by their root mean square: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

    `offset` is 1 for the Gemmas, Qwen3-Next, Qwen3.5 and RecurrentGemma.
    """


@operation(
    "fused.norm", x="... n c", residual="... n c", weight="c", other="... n c?", squares="... n k: wide x?",
)  # fmt: skip
def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0, scale: float = 1.0,
    other: Tensor | None = None, other_scale: float = 1.0, squares: Tensor | None = None,
    squares_norm: tuple[int, float] = (1, 0.0), dtype: torch.dtype | None = None, backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add a layer's output to the residual stream and normalise the sum for the next layer.

        total = residual + scale * x + other_scale * other
        y = total / sqrt(mean(total^2) + eps) * (weight + offset)

    The sum is rounded to the dtype of the stream before it is normalised, as the models do; its terms are not.

    Args:
        residual: the stream; float32 where the model keeps it so.  Read, never written.
        scale: factor of x, such as Granite's residual multiplier.
        other: what a layer computes beside x (shared and routed experts, attention and recurrence), or None.
        squares: parts of the sum of squares of the rows that x was projected from.  x then lacks the factor of an
            RMSNorm of those rows, by which it is multiplied: 1 / sqrt(sum of squares / width + eps).
        squares_norm: that width and eps.
        dtype: of y; None for that of x.

    Returns:
        y; and total, dtype of residual.
    """


# Rotary positions, activations, inputs of delta rules, experts.


@operation(
    "fused.pointwise", "t in (1, b)", "r % 2 == 0", "r <= d",
    q="b h n d", k="b hk n d", cos="t n r", sin="t n r",
)  # fmt: skip
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions (RoFormer, arXiv 2104.09864), in halves.

        y[c] = x[c] cos[c] - x[c + r / 2] sin[c]                    c < r / 2
        y[c] = x[c] cos[c] + x[c - r / 2] sin[c]          r / 2 <= c < r
        y[c] = x[c]                                           r <= c

    Returns:
        q and k rotated, the same shapes and dtypes, in the memory of [b, n, h, d].
    """


@operation("fused.pointwise", gate="... n c", up="... n c?", activation=f"one of {', '.join(ACTIVATIONS)}")
def gated_activation(
    gate: Tensor, up: Tensor | None, *, activation: str = "silu", scale: float = 1.0, backend: Backend = "auto"
) -> Tensor:
    """Apply an activation and multiply: act(scale * gate) * up, the middle of a gated feed-forward.

    `activation` is "silu", "gelu_tanh" (the approximation by tanh) or "relu_squared"; up None is a factor of 1.
    """


@operation(
    "fused.pointwise", "2 * key_heads divides c",
    qk="b n c", b="b n hv", a="b n hv?", A_log="hv?", dt_bias="hv?",
)  # fmt: skip
def delta_inputs(
    qk: Tensor, b: Tensor, a: Tensor | None = None, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    key_heads: int, eps: float = 1e-6, scale: float = 1.0, backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Make what a gated delta rule takes from what a layer projects and convolves (arXiv 2412.06464, 2510.26692).

        q = q / sqrt(|q|^2 + eps), k likewise      g = -exp(A_log) softplus(a + dt_bias)      beta = scale sigmoid(b)

    Args:
        qk: q and then k of all key heads.
        b: raw betas.
        a: raw decays, with A_log and dt_bias; None where something else makes them (KDA).
        scale: factor of beta; 2 where eigenvalues may be negative.

    Returns:
        q and k [b, n, hk, dk], g [b, n, hv] or None, beta [b, n, hv]; float32 (float64 for float64 inputs).
    """
    if not (a is None) == (A_log is None) == (dt_bias is None):
        raise ValueError("a, A_log and dt_bias go together")


@operation(
    "fused.experts",
    x="t c", index="t k: int64", weights="t k", up="experts (1+gated)*i c", down="experts c i",
    activation=f"one of {', '.join(ACTIVATIONS)}",
)  # fmt: skip
def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str = "silu",
    gated: bool = True, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Run the experts that every row is routed to, and add up their outputs.

        y[t] = sum over k of weights[t, k] down[e] (act(gate[e] x[t]) * (up[e] x[t]))        e = index[t, k]

    The middle is rounded to the dtype of x, as the models do.  The Triton version is for the few rows of a tree: each
    expert's weights are read once for every 16 of its rows.

    Args:
        index: different experts for each row.
        up: gate above up where the experts are `gated`.
        activation: see `gated_activation`.

    Returns:
        y, float[t, c].
    """


# Between verify and commit: random numbers, draws and the MATCH walk.  Counter-based numbers (Philox 4x32-10, Salmon et
# al., SC 2011) depend on a key and a counter alone, so they are equal bit for bit on every backend.


def _check_seed(seed: int | Tensor | None, like: Tensor) -> None:
    """Require an integer, or int64[] or int64[b] for the sequences of a tensor [b, ...], on its device."""
    if isinstance(seed, Tensor):
        check("seed", seed, "int64", (like.shape[:1].numel(),) if seed.dim() else (), like)


@operation("sampling.kernel", cpu="sampling.cpu", position="...: int64", sequence="...: int64", node="...: int64")
def philox_uniform(
    position: Tensor, sequence: Tensor, node: Tensor, *, seed: int | Tensor, purpose: int = 0, backend: Backend = "auto"
) -> Tensor:
    """Compute the uniform number of each counter (position, sequence, purpose, node) under the key `seed`.

    Equal to `stree.sampling.Random.uniform`.  Words count modulo 2^32, the seed modulo 2^64.

    Args:
        seed: any integer; or int64[b], one for each entry of the words' first dimension.
        purpose: what the numbers are for; 0 is the target's own tokens.

    Returns:
        float64[...], 53 random bits, in [0, 1).
    """
    _check_seed(seed, position)


@operation("sampling.kernel", "vocab > 0", probs="... vocab", uniform="...: float64")
def choice(probs: Tensor, uniform: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Draw one index from each distribution by inversion of its cumulative sums.

    Weights are rounded to multiples of 2^-60 and summed as integers, which no order of summation changes: every
    backend and device gives the same index.  `stree.sampling.Random.choice` sums in float64 from left to right.  Where
    all weights are multiples of 2^-50, as float32 weights above 2^-27 are, its sums are exact too and the index is the
    same; else it is, unless the number falls within about vocab * 2^-53 of a boundary.

    Args:
        probs: not negative, summing to at most 4; the sum need not be one.  A distribution of zeros gives index 0.
        uniform: in [0, 1).

    Returns:
        int64[...]; never an index whose weight is below 2^-61, unless all are.
    """


@operation("sampling.kernel", "vocab > 0", cpu="sampling.cpu", dist="b rows vocab", uniform="b rows count: float64")
def draw_distinct(
    dist: Tensor, uniform: Tensor, *, least: float = 0.0, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Draw several indices from each distribution without replacement, one after the other, as `choice` does.

    Args:
        dist: not negative, summing to at most 4; the sum need not be one.  Weights below 2^-61 count as 0.
        uniform: in [0, 1).
        least: nothing is drawn from less than this share of a distribution.

    Returns:
        int64[b, rows, count] indices in draw order, and their probabilities under `dist`, of its dtype: 0 where
        nothing was left to be drawn from, and the index is then meaningless.
    """


@operation(
    "sampling.kernel", "vocab > 0",
    tokens="b n: int64", scores="b n vocab", sequences="b: int64?", positions="b: int64?",
)  # fmt: skip
def match_accept(
    tokens: Tensor, parents: Parents, scores: Tensor, *, max_depth: int | None = None, seed: int | Tensor | None = None,
    sequences: Tensor | None = None, positions: Tensor | None = None, backend: Backend = "auto",
) -> MatchedPath:  # fmt: skip
    """Draw the target's token at every node and follow the children that carry what was drawn (MATCH).

    Without a seed the draw is the argmax, the first of equals (greedy).  With one it is `choice` by the number of
    counter (positions + depth + 1, sequences, 0, 0): one number a position, whatever the tree, which is what plain
    sampling at that position draws by.  Of several paths that match (siblings of the same token), the deepest counts,
    the elder of equals.

    Args:
        tokens: token of each node.
        scores: logits without a seed, distributions as `choice` takes them with one; not NaN.
        max_depth: bound of the depths; the returned paths have min(n, max_depth + 1) entries.  None: n - 1.
        seed: key of the numbers: an integer, or int64[b], one for each sequence; None for greedy.
        sequences: with a seed.
        positions: of the root; with a seed.
    """
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    for name, words in (("sequences", sequences), ("positions", positions)):
        if (words is None) != (seed is None):
            raise ValueError(f"seed, sequences and positions go together, got seed {seed} and {name} {words}")
    _check_seed(seed, scores)
