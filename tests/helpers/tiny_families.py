"""Tiny configurations of the families, by model_type; tiny_families_delta.py adds those of the delta-rule kind.

Every one mixes all kinds of layers that its family has, crosses a chunk border within a dozen tokens and has sizes
that are not powers of two somewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from transformers import PreTrainedModel

VOCAB = 97
IDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
SHARED: dict[str, Any] = {**IDS, "hidden_size": 32, "initializer_range": 0.1, "max_position_embeddings": 512}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def build(name: str, *parts: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """Make a model of class ``<name>ForCausalLM``; later arguments of its config override earlier ones."""
    merged: dict[str, Any] = {}
    for part in (*parts, changes):
        merged |= part
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model: PreTrainedModel = model_class(model_class.config_class(**merged))
    return model


def _zamba(name: str, **changes: Any) -> PreTrainedModel:
    """Make a Zamba: a shared block before the second and the fourth of five layers."""
    kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"]
    layers = {
        "num_hidden_layers": 5,
        "layers_block_type": kinds,
        "mamba_d_state": 6,
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
    }
    return build(name, SHARED, HEADS, layers, **changes)


SSD: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 8,
    "mamba_expand": 2,
}  # fmt: skip
GEMMA: dict[str, Any] = {**SHARED, **HEADS, "num_hidden_layers": 4, "head_dim": 12, "sliding_window": 7}
MAMBA: dict[str, Any] = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "time_step_rank": 3}

BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "bamba": partial(build, "Bamba", SHARED, HEADS, SSD, {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": partial(build, "FalconH1", SHARED, HEADS, SSD, {
        "num_hidden_layers": 2, "mamba_d_ssm": 64, "ssm_in_multiplier": 1.5, "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.6, 1.3, 0.8, 1.4, 0.9], "attention_in_multiplier": 1.2, "key_multiplier": 0.8,
        "attention_out_multiplier": 0.9, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.9, 1.1],
    }),
    "falcon_mamba": partial(build, "FalconMamba", MAMBA),
    "gemma": partial(build, "Gemma", SHARED, HEADS, {"num_hidden_layers": 2, "head_dim": 12, "num_key_value_heads": 1}),
    "gemma2": partial(build, "Gemma2", GEMMA, {
        "query_pre_attn_scalar": 12, "attn_implementation": "eager", "attn_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "gemma3_text": partial(build, "Gemma3", GEMMA, {
        "query_pre_attn_scalar": 12, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
    }),
    "granitemoehybrid": partial(build, "GraniteMoeHybrid", SHARED, HEADS, SSD, {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "embedding_multiplier": 2.0,
        "logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3,
        "position_embedding_type": "rope",
    }),
    "jamba": partial(build, "Jamba", SHARED, HEADS, {
        "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 6, "mamba_dt_rank": 3,
    }),
    "llama": partial(build, "Llama", SHARED, HEADS, {"num_hidden_layers": 2}),
    "mamba": partial(build, "Mamba", MAMBA),
    "mamba2": partial(build, "Mamba2", IDS, {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 12, "n_groups": 2,
        "chunk_size": 8, "expand": 2,
    }),
    "mistral": partial(build, "Mistral", SHARED, HEADS, {"num_hidden_layers": 2, "sliding_window": 7}),
    "nemotron_h": partial(build, "NemotronH", SHARED, HEADS, {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"], "head_dim": 12,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 8,
        "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    }),
    "qwen2": partial(build, "Qwen2", SHARED, HEADS, {
        "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    }),
    "qwen3": partial(build, "Qwen3", SHARED, HEADS, {"num_hidden_layers": 2, "head_dim": 12}),
    "zamba": partial(_zamba, "Zamba", mamba_dt_rank=3),
    "zamba2": partial(
        _zamba, "Zamba2", mamba_ngroups=2, chunk_size=8, num_mem_blocks=2, use_shared_attention_adapter=True,
        adapter_rank=3, use_mem_rope=True,
    ),
}  # fmt: skip
