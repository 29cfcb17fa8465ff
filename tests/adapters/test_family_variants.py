"""Variants of families, by option of their configs: trees are exact."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from helpers.family_states import advanced, rebind_float32
from helpers.tiny_family_models import ROUTED, family_model
from helpers.tiny_models import (
    TOLERANCE,
    check_steps,
    patched,
    random_texts,
    random_tree,
    right_padded,
    tree_error,
)

FLOAT32 = TOLERANCE[torch.float32]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    chosen: torch.dtype = request.param
    if chosen == torch.float64:
        rebind_float32(monkeypatch)
    return chosen


OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
RECURRENT = {"layer_types": ["linear_attention"] * 3}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba-no-attention": ("bamba", {"attn_layer_indices": []}),
    "falcon_h1-norm-before-gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "falcon_h1-norm-after-gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "granitemoehybrid-no-attention": ("granitemoehybrid", RECURRENT),
    "granitemoehybrid-no-positions": ("granitemoehybrid", {"position_embedding_type": None}),
    "granitemoehybrid-no-experts": ("granitemoehybrid", {"num_local_experts": 0}),
    "jamba-no-experts-and-bias": ("jamba", {"num_experts": 1, "mamba_proj_bias": True}),
    "kimi_linear-no-attention": ("kimi_linear", RECURRENT),
    "lfm2-no-attention": ("lfm2", {"layer_types": ["conv"] * 4}),
    "mamba-biases": ("mamba", {"use_bias": True, "use_conv_bias": False}),
    "mamba-conv1": ("mamba", {"conv_kernel": 1}),
    "mamba-conv2": ("mamba", {"conv_kernel": 2}),
    "mamba2-conv1": ("mamba2", {"conv_kernel": 1}),
    "falcon_mamba-conv7": ("falcon_mamba", {"conv_kernel": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "nemotron_h-no-attention": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "moe"]}),
    "nemotron_h-latent-experts": ("nemotron_h", {"moe_latent_size": 20}),
    "nemotron_h-dt-limit": ("nemotron_h", {"time_step_min": 0.09}),
    "qwen3-window-and-bias": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "attention_bias": True},
    ),
    "qwen3_next-no-attention": ("qwen3_next", RECURRENT),
    "recurrent_gemma-no-attention": ("recurrent_gemma", {"block_types": ["recurrent"]}),
    "zamba-no-attention": ("zamba", {"layers_block_type": ["linear_attention"] * 5}),
    "zamba-one-head": ("zamba", {"n_mamba_heads": 1}),
    "zamba-bias": ("zamba", {"mamba_proj_bias": True}),
    "zamba2-one-plain-block": (
        "zamba2",
        {"num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64], indirect=True, ids=["float64"])
def test_variants_of_a_family_are_exact(family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    if (family, changes) == VARIANTS["recurrent_gemma-no-attention"] and OLD:
        pytest.skip(f"transformers {transformers.__version__} cannot run RecurrentGemma without attention itself")
    rng = random.Random(7)
    model = family_model(family, dtype, **changes)
    lm = patched(model)
    state, texts = advanced(lm, rng, [10, 2])
    tree = random_tree(rng, [12, 7])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[dtype]


def test_a_decay_of_zero_forgets_what_was_before_and_leaves_no_nan() -> None:
    rng, model = random.Random(0), family_model("recurrent_gemma")
    for name, parameter in model.named_parameters():
        if name.endswith("recurrent_param"):
            torch.nn.init.constant_(parameter, 200.0)  # exp(-8 * 200 * gate) is no float32 above 0
    lm, texts = patched(model), random_texts(rng, [7, 4])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    check_steps(model, lm, state, texts, (rng, [9, 5]), FLOAT32)


def test_a_module_may_stand_in_several_layers() -> None:
    rng = random.Random(11)
    model = family_model("zamba")
    layers = model.model.layers
    layers[3].shared_transf = layers[1].shared_transf  # transformers makes two modules and ties their weights
    lm = patched(model)
    state, texts = advanced(lm, rng, [10, 2])
    tree = random_tree(rng, [12, 7])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral", "qwen2"])
def test_control_without_its_sliding_window_a_family_is_another_model(family: str) -> None:
    rng = random.Random(8)
    lm = patched(family_model(family))
    state, texts = advanced(lm, rng, [12])
    tree = random_tree(rng, [12])
    wide = family_model(family, sliding_window=64)
    assert tree_error(wide, texts, tree, lm.verify(state, tree)) > 100 * FLOAT32


@pytest.mark.parametrize("family", ["gemma", "llama"])
def test_a_sliding_window_that_only_the_config_has_hides_nothing(family: str) -> None:
    rng = random.Random(8)
    model = family_model(family, sliding_window=5)
    lm = patched(model)
    state, texts = advanced(lm, rng, [12, 9])
    tree = random_tree(rng, [12, 4])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [(family, "return_dict", False) for family in ("falcon_mamba", "mamba", "mamba2")]  # transformers runs no other so
    + [(family, "output_router_logits", True) for family in sorted(ROUTED)],
)
def test_what_a_config_asks_to_be_given_changes_nothing(family: str, setting: str, value: bool) -> None:
    model = family_model(family)
    lm, text, tree = patched(model), random_texts(random.Random(0), [7]), random_tree(random.Random(0), [7])
    setattr(lm.model.config, setting, value)
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, torch.tensor(text))
    assert tree_error(model, text, tree, lm.verify(state, tree)) < FLOAT32
