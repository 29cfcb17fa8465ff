"""Variants of families, by option of their configs: trees are exact."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from helpers.family_states import Decoding
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import ROUTED, family_model
from helpers.tiny_models import TOLERANCE, patched, random_texts, random_tree, tree_error

FLOAT32 = TOLERANCE[torch.float32]
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
RECURRENT = {"layer_types": ["linear_attention"] * 3}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.8,
        "mscale_all_dim": 0.9}  # fmt: skip
# By id, which begins with the family.
VARIANTS: dict[str, dict[str, Any]] = {
    "bailing_hybrid-unbounded-decay": {"kda_safe_gate": False},
    "bailing_hybrid-yarn": {"rope_parameters": YARN, "attention_bias": True},
    "bamba-attention-first": {"attn_layer_indices": [0]},
    "bamba-no-attention": {"attn_layer_indices": []},
    "bamba-only-attention": {"attn_layer_indices": [0, 1, 2]},
    "bamba-dt-limit": {"time_step_limit": (0.3, 0.6)},
    "bamba-projection-bias": {"mamba_proj_bias": True},
    "falcon_h1-norm-after-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "falcon_h1-norm-before-gate": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "falcon_mamba-conv7": {"conv_kernel": 7},
    "granitemoehybrid-no-attention": RECURRENT,
    "granitemoehybrid-no-experts": {"num_local_experts": 0},
    "granitemoehybrid-no-positions": {"position_embedding_type": None},
    "jamba-no-experts-and-bias": {"num_experts": 1, "mamba_proj_bias": True},
    "kimi_linear-eager-attention": {"attn_implementation": "eager"},
    "kimi_linear-low-rank-queries": {"q_lora_rank": 7, "linear_conv_kernel_dim": 2},
    "kimi_linear-no-attention": RECURRENT,
    "lfm2-biases": {"conv_bias": True, "conv_L_cache": 2},
    "lfm2-no-attention": {"layer_types": ["conv"] * 4},
    "lfm3-no-gate": {"use_attention_gate": False, "use_sandwich_norm": False, "sliding_window": 3},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-other-headdim": {"head_dim": 24},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "mamba-biases": {"use_bias": True, "use_conv_bias": False},
    "mamba-conv1": {"conv_kernel": 1},
    "mamba-conv2": {"conv_kernel": 2},
    "mamba2-conv1": {"conv_kernel": 1},
    "mamba2-conv2-group1": {"conv_kernel": 2, "n_groups": 1},
    "mamba2-conv7": {"conv_kernel": 7},
    "mamba2-dt-limit": {"time_step_limit": (0.3, 0.6)},
    "mamba2-no-conv-bias": {"use_conv_bias": False},
    "mamba2-projection-bias": {"use_bias": True},
    "minimax-attention-first": {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "minimax-window": {"sliding_window": 5},
    "mistral-no-window": {"sliding_window": None},
    "nemotron_h-dt-limit": {"time_step_min": 0.09},
    "nemotron_h-latent-experts": {"moe_latent_size": 20},
    "nemotron_h-no-attention": {"layers_block_type": ["linear_attention", "mlp", "moe"]},
    "olmo_hybrid-positive-eigenvalues": {"linear_allow_neg_eigval": False, "linear_num_key_heads": 4},
    "olmo_hybrid-rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "qwen3-window-and-bias": {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "attention_bias": True,
    },
    "qwen3_5_text-one-tap": {"linear_conv_kernel_dim": 1},
    "qwen3_next-dense-layer": {"mlp_only_layers": [1], "linear_num_value_heads": 2},
    "qwen3_next-no-attention": RECURRENT,
    "recurrent_gemma-biases": {"attention_bias": True, "num_key_value_heads": 4},
    "recurrent_gemma-no-attention": {"block_types": ["recurrent"]},
    "zamba-bias": {"mamba_proj_bias": True},
    "zamba-no-attention": {"layers_block_type": ["linear_attention"] * 5},
    "zamba-one-head": {"n_mamba_heads": 1},
    "zamba2-one-plain-block": {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False},
}  # fmt: skip
FAST = {  # in float32; one or two of each adapter
    "bailing_hybrid-yarn", "bamba-projection-bias", "kimi_linear-low-rank-queries", "lfm2-biases", "llama-biases",
    "mamba-biases", "mamba2-conv2-group1", "mamba2-dt-limit", "minimax-window", "olmo_hybrid-positive-eigenvalues",
    "qwen3_5_text-one-tap", "recurrent_gemma-biases", "zamba-one-head", "zamba2-one-plain-block",
}  # fmt: skip
IN_FLOAT32 = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in VARIANTS]


def check(name: str, dtype: torch.dtype) -> None:
    """Compare ragged prompts and three trees of a variant with fresh forwards."""
    if name == "recurrent_gemma-no-attention" and OLD:
        pytest.skip(f"transformers {transformers.__version__} cannot run RecurrentGemma without attention itself")
    decoding = Decoding(family_model(name.partition("-")[0], dtype, **VARIANTS[name]), [10, 2, 1])
    assert decoding.prompt_error() < TOLERANCE[dtype]
    for sizes in ([12, 7, 2], [8, 8, 8]):
        decoding.step(sizes)
    decoding.score([12, 7, 2])


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_variants_of_a_family_are_exact(name: str) -> None:
    check(name, torch.float32)


@pytest.mark.parametrize(
    "name", slow_unless(lambda _: False, VARIANTS, in_ci=lambda name: [*VARIANTS].index(name) % 2 == 0)
)
@pytest.mark.parametrize("dtype", [torch.float64], indirect=True, ids=["float64"])
def test_variants_of_a_family_are_exact_in_float64(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)


@pytest.mark.parametrize("logarithm", [200.0, 1e3])  # exp(-8 * 200 * gate) is not a float32 above 0
def test_a_decay_of_zero_forgets_what_was_before_and_leaves_no_nan(logarithm: float) -> None:
    model = family_model("recurrent_gemma")
    for name, parameter in model.named_parameters():
        if name.endswith("recurrent_param"):
            parameter.data[::2] = logarithm
    decoding = Decoding(model, [7, 4])
    decoding.step([9, 5])
    decoding.score([9, 5])


def test_several_layers_may_share_a_module() -> None:
    model = family_model("zamba")
    layers = model.model.layers
    layers[3].shared_transf = layers[1].shared_transf  # transformers makes two modules and ties their weights
    decoding = Decoding(model, [10, 2])
    decoding.step([8, 8])
    decoding.score([12, 7])


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral", "qwen2"])
def test_control_without_its_sliding_window_a_family_is_another_model(family: str) -> None:
    decoding = Decoding(family_model(family), [12])
    decoding.step([8])
    assert decoding.error(decoding.tree([12]), family_model(family, sliding_window=64)) > 100 * FLOAT32


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_a_sliding_window_that_only_the_config_has_hides_nothing(family: str) -> None:
    decoding = Decoding(family_model(family, sliding_window=5), [12, 9])
    decoding.step([8, 8])
    decoding.score([12, 4])


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [(family, "return_dict", False) for family in ("falcon_mamba", "mamba", "mamba2")]  # transformers runs no other so
    + [(family, "output_router_logits", True) for family in sorted(ROUTED)],
)
def test_outputs_that_a_config_asks_for_change_nothing(family: str, setting: str, value: bool) -> None:
    model = family_model(family)
    lm, text, tree = patched(model), random_texts(random.Random(0), [7]), random_tree(random.Random(0), [7])
    setattr(lm.model.config, setting, value)
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, torch.tensor(text))
    assert tree_error(model, text, tree, lm.verify(state, tree)) < FLOAT32
