"""Configs of tiny models with layers of every kind, for ``stree doctor``."""

from __future__ import annotations

from typing import Any

__all__ = ["MODELS"]

_LAYERS: dict[str, Any] = {"hidden_size": 128, "vocab_size": 512, "num_hidden_layers": 2, "pad_token_id": 0}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
_KINDS: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {  # with a layer of every kind
    "bamba": {
        **_LAYERS, **_HEADS, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64,
    },
    "mamba": {**_LAYERS, "state_size": 16},
    "qwen3_next": {
        **_LAYERS, **_HEADS, **_KINDS, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
    "kimi_linear": {
        **_LAYERS, **_HEADS, **_KINDS, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 32, "qk_nope_head_dim": 32, "mlp_layer_types": ["dense", "dense"], "linear_head_dim": 32,
        "linear_num_heads": 4,
    },
    "recurrent_gemma": {
        **_LAYERS, **_HEADS, "block_types": ["recurrent", "attention"], "num_key_value_heads": 1, "lru_width": 128,
    },
    "lfm2": {**_LAYERS, **_HEADS, "layer_types": ["conv", "full_attention"]},
    "minimax": {
        **_LAYERS, **_HEADS, **_KINDS, "head_dim": 32, "block_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
