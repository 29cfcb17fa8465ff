"""The drafter, a small Mamba-2 of transformers, and the fast forward that it is trained with.

transformers runs the Mamba-2 chunk scan in float32 with `B` and `C` repeated for every head.  ``use_training_forward``
replaces the layers' forward by the same mathematics in batched matmuls at a chosen dtype, with the decays in float32
and `B C^T` computed once a group; ``check_forward`` compares both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedModel

from stree.models.prefill_functions import route_model

__all__ = [
    "CHUNK",
    "Compile",
    "build",
    "check_forward",
    "drafter_config",
    "hidden_states",
    "initialise",
    "mixer_arguments",
    "mixer_block",
    "rms_norm",
    "use_training_forward",
]

CHUNK = 64
"""Chunk length of the training scan."""

Compile = Callable[[Callable], Callable]


def drafter_config(vocab_size: int, hidden: int, layers: int, special: Mapping[str, Any]) -> Mamba2Config:
    """Describe a Mamba-2 drafter.

    Args:
        vocab_size: logits of the target, padding rows included.
        hidden: width, a multiple of 16.
        layers: how many.
        special: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
    """
    is_small = hidden < 256 or hidden % 32 != 0
    head_dim = 32 if is_small else 64
    return Mamba2Config(
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        hidden_size=hidden,
        num_hidden_layers=layers,
        expand=2,
        num_heads=2 * hidden // head_dim,
        head_dim=head_dim,
        state_size=head_dim,
        n_groups=1,
        conv_kernel=4,
        chunk_size=CHUNK,
        initializer_range=0.02,
        residual_in_fp32=True,
        **special,
    )


def build(config: Mamba2Config) -> PreTrainedModel:
    """Build a drafter with fresh weights, drawn from torch's global generator."""
    return initialise(Mamba2ForCausalLM(config))


@torch.no_grad()
def initialise(model: PreTrainedModel) -> PreTrainedModel:
    """Draw weights as mamba-ssm does: dt log-uniform in [1e-3, 1e-1], A uniform in [1, 16]."""
    depth = model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            dt = torch.exp(torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)))
            parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif name.endswith("A_log"):
            parameter.uniform_(1.0, 16.0).log_()
        elif name.endswith("_proj.weight"):
            residual = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            std = 1.0 / math.sqrt(parameter.shape[1] * (2.0 * depth if residual else 1.0))
            parameter.normal_(0.0, std)
    model.get_input_embeddings().weight.normal_(0.0, 0.02)
    return model


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """Mamba-2 scan over chunks in matmul form (Dao & Gu 2024, section 6) with one group of `B` and `C`.

    Args:
        x: inputs (batch, length, heads, headdim); length is a multiple of `chunk`.
        dt: positive time steps, float32 (batch, length, heads).
        A: negative decay rates, float32 (heads,).
        B: input directions (batch, length, dstate).
        C: output directions (batch, length, dstate).
        chunk: chunk length.
        dtype: dtype of the matmuls; decays and the recurrence across chunks stay in float32.

    Returns:
        Outputs without the skip term, float32 (batch, length, heads, headdim).
    """
    batch, length, heads, headdim = x.shape
    count, dstate = length // chunk, B.shape[-1]
    decay = (dt * A).view(batch, count, chunk, heads).cumsum(2)  # log decay from the chunk's start, inclusive
    values = (x.float() * dt[..., None]).view(batch, count, chunk, heads, headdim)
    B = B.reshape(batch * count, chunk, dstate).to(dtype)
    C = C.reshape(batch * count, chunk, dstate).to(dtype)
    # Inside a chunk: (C B^T) * exp(decay difference), causal.
    scores = torch.bmm(C, B.transpose(1, 2)).view(batch, count, 1, chunk, chunk)
    log_decay = decay.permute(0, 1, 3, 2)  # (batch, count, heads, chunk)
    gap = log_decay[..., :, None] - log_decay[..., None, :]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    weights = (scores.float() * torch.exp(gap.masked_fill(~causal, -float("inf")))).to(dtype)
    by_head = values.to(dtype).permute(0, 1, 3, 2, 4).reshape(batch * count * heads, chunk, headdim)
    inside = torch.bmm(weights.view(batch * count * heads, chunk, chunk), by_head)
    inside = inside.view(batch, count, heads, chunk, headdim).permute(0, 1, 3, 2, 4)
    # State a chunk adds, then the recurrence across chunks as one small matmul.
    to_end = torch.exp(decay[:, :, -1:] - decay)
    added = (values * to_end[..., None]).to(dtype).view(batch * count, chunk, heads * headdim)
    added = torch.bmm(B.transpose(1, 2), added).view(batch, count, dstate, heads, headdim)
    total = decay[:, :, -1].cumsum(1)  # (batch, count, heads)
    before = F.pad(total, (0, 0, 1, 0))[:, :-1]
    reach = before.permute(0, 2, 1)[..., :, None] - total.permute(0, 2, 1)[..., None, :]
    earlier = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
    reach = torch.exp(reach.masked_fill(~earlier, -float("inf")))  # (batch, heads, count, count)
    added = added.float().permute(0, 3, 1, 2, 4).reshape(batch * heads, count, dstate * headdim)
    state = torch.bmm(reach.reshape(batch * heads, count, count), added)
    state = state.view(batch, heads, count, dstate, headdim).permute(0, 2, 3, 1, 4)
    across = torch.bmm(C, state.to(dtype).reshape(batch * count, dstate, heads * headdim))
    across = across.view(batch, count, chunk, heads, headdim).float() * torch.exp(decay)[..., None]
    return (inside.float() + across).reshape(batch, length, heads, headdim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in float32."""
    x = x.float()
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def mixer_block(
    hidden: Tensor,
    norm: Tensor,
    in_proj: Tensor,
    conv: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    gate_norm: Tensor,
    out_proj: Tensor,
    sizes: tuple[int, int, int],
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Pre-norm Mamba-2 mixer with its residual: (batch, length, hidden) -> the same.

    `sizes` holds heads, headdim and dstate; the other arguments are the layer's weights.
    """
    heads, headdim, dstate = sizes
    inner, length = heads * headdim, hidden.shape[1]
    projected = F.linear(rms_norm(hidden, norm, eps).to(dtype), in_proj.to(dtype))
    gate, mixed, dt = projected.split([inner, inner + 2 * dstate, heads], dim=-1)
    width = conv.shape[-1]
    padded = F.pad(mixed, (0, 0, width - 1, 0)).float()
    mixed = sum((padded[:, i : i + length] * conv[:, 0, i] for i in range(width)), conv_bias)
    x, B, C = F.silu(mixed).to(dtype).split([inner, dstate, dstate], dim=-1)
    x = x.reshape(*x.shape[:2], heads, headdim)
    y = ssd(x, F.softplus(dt.float() + dt_bias), -torch.exp(A_log), B, C, min(CHUNK, length), dtype)
    y = (y + D[:, None] * x.float()).reshape(*hidden.shape[:2], inner)
    y = rms_norm(y * F.silu(gate.float()), gate_norm, eps)
    return hidden.float() + F.linear(y.to(dtype), out_proj.to(dtype)).float()


def mixer_arguments(norm: Any, mixer: Any) -> tuple:
    """Arguments of ``mixer_block`` after ``hidden``, without the dtype, read from a transformers layer."""
    sizes = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    weights = (mixer.in_proj.weight, mixer.conv1d.weight, mixer.conv1d.bias, mixer.dt_bias, mixer.A_log, mixer.D)
    return (norm.weight, *weights, mixer.norm.weight, mixer.out_proj.weight, sizes, norm.variance_epsilon)


def use_training_forward(model: PreTrainedModel, dtype: torch.dtype, compile: Compile = lambda f: f) -> None:
    """Replace the forward of every layer by the fast training form, in place; the weights are shared.

    Windows must be a multiple of ``CHUNK`` long, or shorter than it, unpadded and without a cache.

    Args:
        model: a Mamba-2 model.
        dtype: dtype of the matmuls.
        compile: wraps the block functions, ``torch.compile`` for instance.
    """
    block = compile(mixer_block)

    def forward(self: Any, hidden_states: Tensor, **_: object) -> Tensor:
        return cast(Tensor, block(hidden_states, *mixer_arguments(self.norm, self.mixer), dtype))

    for layer in cast(Any, model.base_model).layers:
        layer.forward = MethodType(forward, layer)


def hidden_states(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Final hidden states of a model without a cache: int64[batch, length] -> float[batch, length, hidden]."""
    return cast(Tensor, model.base_model(tokens, use_cache=False).last_hidden_state)


@torch.no_grad()
def check_forward(
    model: PreTrainedModel, replace: Callable[[PreTrainedModel, torch.dtype], None], tolerance: float = 1e-4
) -> float:
    """Compare a model's own forward with the one that ``replace`` puts in its place, in float32.

    Args:
        model: in float32; its forward stays replaced.
        replace: called with the model and float32.
        tolerance: of the final hidden states, relative to their largest size.

    Returns:
        The largest difference, relative.

    Raises:
        RuntimeError: it is above ``tolerance``.
    """
    route_model(model)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, model.config.vocab_size, (2, 3 * CHUNK), generator=rng).to(model.device)
    own = hidden_states(model.eval(), tokens)
    replace(model, torch.float32)
    error = float((own - hidden_states(model, tokens)).abs().max() / own.abs().max())
    if not error <= tolerance:
        raise RuntimeError(f"the training scan disagrees with transformers: relative error {error:.2e} > {tolerance}")
    return error
