"""A tiny model of every family by model_type, with weights under which states matter.

Every one mixes all kinds of layers that its family has, crosses a chunk border within a dozen tokens and has sizes that
are not powers of two somewhere. Families that transformers lacks are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from helpers.fast_cases import slow_unless

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


BUILDERS |= {
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


FAMILIES = sorted(BUILDERS)
# Together they hold a layer of every kind.
EVERY_ADAPTER = (
    "gemma3_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "minimax",
    "qwen3_next",
    "recurrent_gemma",
    "zamba",
    "zamba2",
)
# Together they hold every kind of state: diagonal, matrix, window and attention.
EVERY_STATE = ("jamba", "lfm2", "qwen3_next", "zamba2")

# Families with experts: in bfloat16 a near-tie of the router may go either way, which changes the logits of a token.
ROUTED = {
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
}


def matrix(
    families: Sequence[str] = FAMILIES, fast: Sequence[str] = EVERY_ADAPTER, in_ci: Sequence[str] = EVERY_ADAPTER
) -> list[Any]:
    """Return families as parameters of a test.

    Those outside ``fast``, which has one for each adapter, are slow; those outside ``in_ci`` exhaustive, too.
    """
    return slow_unless(fast.__contains__, families, in_ci=in_ci.__contains__)


def built(model_type: str, **changes: object) -> PreTrainedModel:
    """Make a model with transformers' own random weights."""
    try:
        return BUILDERS[model_type](**changes)
    except AttributeError as error:
        if "has no attribute" in str(error) and "transformers" in str(error):
            pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
        raise


def family_model(
    model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """Make an unpatched model; the same arguments return the same weights."""
    torch.manual_seed(seed)
    model = built(model_type, **changes)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products do not take float64
    draw_weights(model)
    return model.eval().to(dtype)


@torch.no_grad()
def draw_weights(model: PreTrainedModel) -> None:
    """Make matrices wide, vectors uneven, step sizes large and decays slow, or a state is forgotten at once."""
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "A_log":
            parameter.copy_(torch.rand(parameter.shape) * 3 - 3)
        elif last in ("dt_bias", "dt_proj_bias") or name.endswith("dt_proj.bias"):
            parameter.copy_(torch.rand(parameter.shape) * 3 - 2)
        elif parameter.dim() >= 2:
            parameter.mul_(2.5)
        else:
            parameter.add_(0.1 * torch.randn(parameter.shape))
