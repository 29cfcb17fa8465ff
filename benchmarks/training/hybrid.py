"""A Llama model converted to a hybrid Bamba: some attention layers stay, the others become Mamba-2 layers.

The conversion is that of MambaInLlama (arXiv 2408.15237): the projections of queries, keys, values and outputs become
those of C, B, x and outputs of a Mamba-2 mixer that has one group and one head for each query head.
``use_training_forward`` replaces the forward of the mixers by batched matmuls; the layers around them stay
transformers' code.
"""

import math
from collections.abc import Collection
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, PreTrainedModel

from stree.distill.network import CHUNK, Compile, ssd

__all__ = ["convert", "hybrid_config", "mixers_module", "mixers_of", "use_own_forward", "use_training_forward"]

SCALE = 0.3
"""Factor of queries and keys, so small that the silu after the convolution is nearly linear at first."""

STEP_SIZE = 1e-2
"""dt of every head at first, so small that the gated norm, whose epsilon is 1e-5, is not yet saturated."""

MEMORY = (0.5, 32.0)
"""Tokens after which a state has decayed to 1/e: of the first and the last head; log-uniform between them."""

OPEN_GATE = 1.2784645
"""Bias of the gate at first: silu(OPEN_GATE) is 1."""


def hybrid_config(source: LlamaConfig, attention: Collection[int]) -> BambaConfig:
    """Describe the hybrid of a Llama model.

    Args:
        source: the Llama model's config.
        attention: indices of the layers that keep their attention.

    Raises:
        ValueError: heads that are not as wide together as the model, or an index that is no layer.
    """
    heads, hidden = source.num_attention_heads, source.hidden_size
    if heads * source.head_dim != hidden:
        raise ValueError(f"heads x head_dim must be the model's width {hidden}, got {heads} x {source.head_dim}")
    if not set(attention) <= set(range(source.num_hidden_layers)):
        raise ValueError(f"attention layers must be in [0, {source.num_hidden_layers}), got {sorted(attention)}")
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
            "bos_token_id", "eos_token_id", "pad_token_id", "attention_bias", "mlp_bias")  # fmt: skip
    return BambaConfig(
        **{name: getattr(source, name) for name in same},
        rope_parameters={**source.rope_parameters, "partial_rotary_factor": 1.0},
        attn_layer_indices=sorted(attention),
        mamba_n_heads=heads,
        mamba_d_head=source.head_dim,
        mamba_n_groups=heads,
        mamba_d_state=source.head_dim,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_chunk_size=CHUNK,
        mamba_conv_bias=True,
        mamba_proj_bias=True,  # for the gate, which is open at first
    )


@torch.no_grad()
def convert(source: PreTrainedModel, attention: Collection[int]) -> PreTrainedModel:
    """Build the hybrid of a Llama model, in float32 on the CPU, with mixers that are not yet trained.

    Args:
        source: a LlamaForCausalLM.
        attention: indices of the layers that keep their attention.
    """
    model = BambaForCausalLM(hybrid_config(cast(LlamaConfig, source.config), attention))
    names = {"post_attention_layernorm.": "pre_ff_layernorm.", ".mlp.": ".feed_forward."}
    names |= {"model.norm.": "model.final_layernorm."}
    wanted, copied = model.state_dict(), {}
    for name, value in source.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        if name in wanted:
            copied[name] = value
    missing, _ = model.load_state_dict(copied, strict=False)
    if strange := [name for name in missing if ".mamba." not in name]:
        raise ValueError(f"the source has no weights for {', '.join(strange)}")
    for index, mixer in mixers_of(model).items():
        _initialise(mixer, cast(Any, source.base_model).layers[index].self_attn)
    return model.eval()


def mixers_of(model: PreTrainedModel) -> dict[int, Any]:
    """Mamba-2 mixers of a hybrid by the index of their layer."""
    layers = enumerate(cast(Any, model.base_model).layers)
    return {index: layer.mamba for index, layer in layers if hasattr(layer, "mamba")}


def mixers_module(model: PreTrainedModel) -> nn.ModuleDict:
    """Hold a hybrid's mixers as one module, by the index of their layer."""
    return nn.ModuleDict({str(index): mixer for index, mixer in mixers_of(model).items()})


def _initialise(mixer: Any, attention: Any) -> None:
    """Fill a mixer from an attention module: gate open, convolution that passes the last position, constant dt."""
    heads, inner = mixer.num_heads, mixer.intermediate_size
    key, value = (
        _by_query_head(projection.weight, heads, mixer.head_dim) for projection in (attention.k_proj, attention.v_proj)
    )
    mixer.in_proj.weight.zero_()
    mixer.in_proj.bias.zero_()
    _, x, B, C, _ = mixer.in_proj.weight.split([inner, inner, inner, inner, heads])  # gate, x, B, C, dt
    x.copy_(_by_query_head(attention.v_proj.weight, heads, mixer.head_dim))
    B.copy_(SCALE * _by_query_head(attention.k_proj.weight, heads, mixer.head_dim))
    C.copy_(SCALE * attention.q_proj.weight)
    mixer.in_proj.bias[:inner] = OPEN_GATE
    mixer.out_proj.weight.copy_(attention.o_proj.weight)
    mixer.out_proj.bias.zero_()
    mixer.conv1d.weight.zero_()
    mixer.conv1d.weight[:, 0, -1] = 1.0
    mixer.conv1d.bias.zero_()
    mixer.dt_bias.fill_(math.log(math.expm1(STEP_SIZE)))
    memory = torch.logspace(math.log10(MEMORY[0]), math.log10(MEMORY[1]), heads)
    mixer.A_log.copy_(-torch.log(memory * STEP_SIZE))
    mixer.D.zero_()
    mixer.norm.weight.fill_(1.0)


def _by_query_head(weight: Tensor, heads: int, head_dim: int) -> Tensor:
    """Repeat the rows of keys or values for the query heads that share them: -> [heads * head_dim, hidden]."""
    by_head = weight.view(-1, head_dim, weight.shape[-1])
    return by_head.repeat_interleave(heads // len(by_head), 0).flatten(0, 1)


def mixer_block(
    hidden: Tensor,
    in_proj: Tensor,
    in_bias: Tensor,
    conv: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm: Tensor,
    out_proj: Tensor,
    out_bias: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Mamba-2 mixer with one group for each head: normed hidden states (batch, length, hidden) -> float32 outputs.

    Matmuls run in `dtype`; convolution, decays and the gated norm in float32.  The length is a multiple of `CHUNK`, or
    less than it.
    """
    batch, length, _ = hidden.shape
    heads, inner, width = len(D), len(norm), conv.shape[-1]
    projected = F.linear(hidden.to(dtype), in_proj.to(dtype), in_bias.to(dtype))
    gate, mixed, dt = projected.split([inner, 3 * inner, heads], dim=-1)
    padded = F.pad(mixed, (0, 0, width - 1, 0)).float()
    mixed = F.silu(sum((padded[:, i : i + length] * conv[:, 0, i] for i in range(width)), conv_bias))
    mixed = mixed.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
    x, B, C = mixed.unbind(0)  # each (batch * heads, length, headdim): every head is a scan of its own
    dt = F.softplus(dt.float() + dt_bias).transpose(1, 2).flatten(0, 1)[..., None]
    A = -torch.exp(A_log).repeat(batch)[:, None, None]
    y = ssd(x[:, :, None], dt, A, B, C, min(CHUNK, length), dtype)[:, :, 0] + D.repeat(batch)[:, None, None] * x
    y = y.view(batch, heads, length, -1).transpose(1, 2) * F.silu(gate.float()).view(batch, length, heads, -1)
    y = norm * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).flatten(2)
    return F.linear(y.to(dtype), out_proj.to(dtype)).float() + out_bias


def _weights(mixer: Any) -> list[Tensor]:
    """Weights of a mixer in the order of ``mixer_block``."""
    projections = [(layer.weight, layer.bias) for layer in (mixer.in_proj, mixer.conv1d, mixer.out_proj)]
    return [*projections[0], *projections[1], mixer.dt_bias, mixer.A_log, mixer.D, mixer.norm.weight, *projections[2]]


def use_training_forward(model: PreTrainedModel, dtype: torch.dtype, compile: Compile = lambda f: f) -> None:
    """Replace the forward of a hybrid's mixers by ``mixer_block``, in place; the weights are shared.

    Args:
        model: made by ``convert``; windows are unpadded and without a cache.
        dtype: dtype of the matmuls.
        compile: wraps the block function, ``torch.compile`` for instance.
    """
    block = compile(mixer_block)

    def forward(self: Any, hidden_states: Tensor, **_: object) -> Tensor:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return cast(Tensor, block(hidden_states, *_weights(self), self.norm.variance_epsilon, dtype))

    for mixer in mixers_of(model).values():
        mixer.forward = MethodType(forward, mixer)


def use_own_forward(model: PreTrainedModel) -> None:
    """Put transformers' forward of the mixers back."""
    for mixer in mixers_of(model).values():
        mixer.__dict__.pop("forward", None)
