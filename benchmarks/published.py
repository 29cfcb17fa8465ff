"""Sizes of published models, written down so that nothing is fetched: what differs from transformers' defaults."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

__all__ = ["CUT", "WHOLE", "cut", "whole"]

LINEAR, FULL = "linear_attention", "full_attention"
NEMOTRON_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_KINDS = {"M": LINEAR, "-": "mlp", "*": FULL}
HYBRID = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
SSD = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
# Models cut to a layer of each kind: type and sizes.
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-2.7b": ("mamba2", {
        "num_hidden_layers": 2, "hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50288,
    }),
    "Nemotron-H-8B": ("nemotron_h", {"layers_block_type": [LINEAR, "mlp", FULL], "n_groups": 8}),
    "Bamba-9B": ("bamba", {**SSD, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "Granite-4.0-H-tiny": ("granitemoehybrid", {
        **SSD, **HYBRID, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
        "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
    }),
    "Falcon-H1-7B": ("falcon_h1", {
        "num_hidden_layers": 1, "hidden_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_d_ssm": 3072,
    }),
    "Zamba2-7B": ("zamba2", {
        "num_hidden_layers": 2, "layers_block_type": [LINEAR, "hybrid"], "hidden_size": 3584, "mamba_ngroups": 2,
        "n_mamba_heads": 112, "use_shared_attention_adapter": False,
    }),
    "Falcon-Mamba-7B": ("falcon_mamba", {"hidden_size": 4096, "num_hidden_layers": 2, "time_step_rank": 256}),
    "Jamba-mini": ("jamba", {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "Zamba-7B": ("zamba", {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid"] * 2}),
    "Qwen3-Next-80B": ("qwen3_next", HYBRID),
    "OLMo-hybrid-7B": ("olmo_hybrid", HYBRID),
    "Kimi-Linear-48B": ("kimi_linear", {**HYBRID, "mlp_layer_types": ["dense", "sparse"]}),
    "LFM3": ("lfm3", {"num_hidden_layers": 3, "layer_types": ["conv", FULL, "sliding_attention"]}),
    "MiniMax": ("minimax", HYBRID),
    "RecurrentGemma-9B": ("recurrent_gemma", {
        "num_hidden_layers": 3, "num_attention_heads": 16, "hidden_size": 4096, "lru_width": 4096,
    }),
    "Gemma-2-9B": ("gemma2", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", FULL]}),
    "Gemma-3-4B": ("gemma3_text", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", FULL]}),
    "Mistral-7B": ("mistral", {"num_hidden_layers": 1}),
}  # fmt: skip
# What the whole models have in place of that.
WHOLE: dict[str, dict[str, Any]] = {
    "mamba2-2.7b": {"num_hidden_layers": 64, "tie_word_embeddings": True},
    "Nemotron-H-8B": {"layers_block_type": [NEMOTRON_KINDS[kind] for kind in NEMOTRON_PATTERN]},
    "Granite-4.0-H-tiny": {
        "num_hidden_layers": 40, "layer_types": [FULL if layer in (5, 15, 25, 35) else LINEAR for layer in range(40)],
        "vocab_size": 100352, "tie_word_embeddings": True,
    },
    "Qwen3-Next-80B": {"num_hidden_layers": 48, "layer_types": ([LINEAR] * 3 + [FULL]) * 12},
    "Bamba-9B": {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]},
}  # fmt: skip


def cut(name: str) -> PreTrainedConfig:
    """Configuration of a model with a layer of each kind."""
    kind, sizes = CUT[name]
    return CONFIG_MAPPING[kind](**sizes)


def whole(name: str) -> PreTrainedConfig:
    """Configuration of a whole model, one of `WHOLE`."""
    kind, sizes = CUT[name]
    return CONFIG_MAPPING[kind](**{**sizes, **WHOLE[name]})
