"""Tiny configurations of the families with gated delta rules, short convolutions, lightning attention and RG-LRU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from helpers.tiny_families import HEADS, IDS, SHARED, build

LAYERS: dict[str, Any] = {
    **SHARED, **HEADS, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
DELTA: dict[str, Any] = {
    **LAYERS, "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT: dict[str, Any] = {**MOE, "shared_expert_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **LAYERS, "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_rope_head_dim": 6, "v_head_dim": 9,
    "qk_nope_head_dim": 11, "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 24,
    "num_experts_per_tok": 2, "num_local_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
LFM: dict[str, Any] = {
    **SHARED, **HEADS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "full_attention", "conv"],
}  # fmt: skip


def _minimax(**changes: Any) -> PreTrainedModel:
    """Make a MiniMax whose tables of decays agree with each other in float64, too."""
    sizes = {"block_size": 8, "head_dim": 12, "linear_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.8}
    model = build("MiniMax", LAYERS, MOE, sizes, **changes)
    for module in model.modules():
        if hasattr(module, "slope_rate"):
            module.slope_rate = module.slope_rate.double()
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    return model


def _recurrent_gemma(**changes: Any) -> PreTrainedModel:
    """Make a RecurrentGemma whose attention matters beside its recurrence."""
    sizes = {
        "num_hidden_layers": 4, "block_types": ["recurrent", "attention"], "num_attention_heads": 4, "lru_width": 24,
        "num_key_value_heads": 1, "intermediate_size": 48, "attention_window_size": 7, "w_init_variance_scale": 1.0,
    }  # fmt: skip
    model = build("RecurrentGemma", IDS, {"hidden_size": 32}, sizes, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight") and "temporal_block" in name:
                parameter.mul_(2)
    return model


BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "bailing_hybrid": partial(build, "BailingHybrid", LATENT, {"head_dim": 12, "short_conv_kernel_size": 4}),
    "kimi_linear": partial(build, "KimiLinear", LATENT, {"linear_head_dim": 12, "linear_num_heads": 3}),
    "lfm2": partial(build, "Lfm2", LFM),
    "lfm2_moe": partial(build, "Lfm2Moe", LFM, MOE, {"num_dense_layers": 1}),
    "lfm3": partial(build, "Lfm3", LFM, {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "head_dim": 12, "sliding_window": 7,
    }),
    "minimax": _minimax,
    "olmo_hybrid": partial(build, "OlmoHybrid", DELTA, {"linear_allow_neg_eigval": True}),
    "qwen3_5_moe_text": partial(build, "Qwen3_5Moe", DELTA, SHARED_EXPERT),
    "qwen3_5_text": partial(build, "Qwen3_5", DELTA),
    "qwen3_next": partial(build, "Qwen3Next", DELTA, SHARED_EXPERT),
    "recurrent_gemma": _recurrent_gemma,
}  # fmt: skip
