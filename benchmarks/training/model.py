"""The bundled target, a Bamba, and the fast forward that it is trained with (that of the drafter: `stree.distill`)."""

from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BambaConfig, BambaForCausalLM, PreTrainedModel

from stree.distill.network import CHUNK, Compile, initialise, mixer_arguments, mixer_block, rms_norm


def target_config(vocab_size: int, eos: int, hidden: int = 256, layers: int = 8) -> BambaConfig:
    """Describe a hybrid target, attention at every fourth layer: about 6.0 M parameters where sizes are not given.

    Raises:
        ValueError: a width that is no multiple of 128, or fewer layers than the four that hold one of attention.
    """
    if hidden < 128 or hidden % 128 or layers < 4:
        raise ValueError(
            f"the target's width must be a multiple of 128 and its layers 4 or more, got {hidden}, {layers}"
        )
    return BambaConfig(
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        hidden_size=hidden,
        intermediate_size=hidden * 5 // 4,
        num_hidden_layers=layers,
        attn_layer_indices=[*range(3, layers, 4)],
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=4096,
        mamba_expand=2,
        mamba_n_heads=hidden // 32,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_chunk_size=CHUNK,
        num_logits_to_keep=1,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )


def build(config: BambaConfig) -> PreTrainedModel:
    """Build a target with fresh weights."""
    return initialise(BambaForCausalLM(config))


def mlp_block(
    hidden: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Pre-norm SwiGLU feed-forward with its residual: (batch, length, hidden) -> the same."""
    x = rms_norm(hidden, norm, eps).to(dtype)
    inner = F.silu(F.linear(x, gate.to(dtype))) * F.linear(x, up.to(dtype))
    return hidden.float() + F.linear(inner, down.to(dtype)).float()


def swap(model: PreTrainedModel, dtype: torch.dtype, compile: Compile = lambda f: f) -> None:
    """Replace the forward of every layer by the fast training form, in place; see ``use_training_forward``.

    Args:
        model: a Bamba model.
        dtype: dtype of the matmuls.
        compile: wraps the block functions, `torch.compile` for instance.
    """
    mixer_fn, mlp_fn = compile(mixer_block), compile(mlp_block)

    def mlp_arguments(layer: Any) -> tuple:
        mlp, norm = layer.feed_forward, layer.pre_ff_layernorm
        return norm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, norm.variance_epsilon

    def bamba_mamba(self: Any, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        hidden_states = mixer_fn(hidden_states, *mixer_arguments(self.input_layernorm, self.mamba), dtype)
        return mlp_fn(hidden_states, *mlp_arguments(self), dtype), None

    def bamba_attention(self: Any, hidden_states: Tensor, **options: object) -> tuple[Tensor, None]:
        with torch.autocast(hidden_states.device.type, dtype, enabled=dtype != torch.float32):
            mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        return mlp_fn(hidden_states + mixed.float(), *mlp_arguments(self), dtype), None

    for layer in cast(Any, model.base_model).layers:
        forward = bamba_mamba if hasattr(layer, "mamba") else bamba_attention
        layer.forward = MethodType(forward, layer)
