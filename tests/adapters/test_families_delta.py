"""What only the families beside Mamba have: variants of their layers, state kept on modules, latents, vision towers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_families_delta
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    check_steps,
    extended,
    fresh_logits,
    patched,
    path_to,
    random_texts,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tree_error,
)
from torch import Tensor
from transformers import DynamicCache, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from stree import TokenTree, TreeLM
from stree.models.layers.delta_rule import DeltaSpec
from stree.models.layers.mla import LatentStack

FLOAT32 = TOLERANCE[torch.float32]
FAMILIES = sorted(tiny_families_delta.BUILDERS)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.8,
        "mscale_all_dim": 0.9}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing-unbounded-decay": ("bailing_hybrid", {"kda_safe_gate": False}),
    "bailing-yarn": ("bailing_hybrid", {"rope_parameters": YARN, "attention_bias": True}),
    "kimi-low-rank-queries": ("kimi_linear", {"q_lora_rank": 7, "linear_conv_kernel_dim": 2}),
    "kimi-eager-attention": ("kimi_linear", {"attn_implementation": "eager"}),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 2}),
    "lfm3-no-gate": ("lfm3", {"use_attention_gate": False, "use_sandwich_norm": False, "sliding_window": 3}),
    "minimax-window": ("minimax", {"sliding_window": 5}),
    "minimax-attention-first": ("minimax", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}),
    "olmo-positive-eigenvalues": ("olmo_hybrid", {"linear_allow_neg_eigval": False, "linear_num_key_heads": 4}),
    "olmo-rotary": ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "qwen3_next-dense-layer": ("qwen3_next", {"mlp_only_layers": [1], "linear_num_value_heads": 2}),
    "qwen3_5-one-tap": ("qwen3_5_text", {"linear_conv_kernel_dim": 1}),
    "recurrent_gemma-biases": ("recurrent_gemma", {"attention_bias": True, "num_key_value_heads": 4}),
}


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_family_are_exact(family: str, changes: dict[str, Any]) -> None:
    rng = random.Random(0)
    model = family_model(family, **changes)
    lm, texts = patched(model), random_texts(rng, [10, 2, 1])
    state = lm.new_state(3, 64, 16)
    logits = lm.prefill(state, *right_padded(texts))
    for row, text in enumerate(texts):
        assert relative_error(logits[row], fresh_logits(model, text)[-1]) < FLOAT32
    check_steps(model, lm, state, texts, (rng, [12, 7, 2]), FLOAT32)


@pytest.mark.parametrize("family", matrix(FAMILIES))
def test_an_empty_state_scores_a_text_from_its_first_token(family: str) -> None:
    rng = random.Random(1)
    model = family_model(family)
    lm = patched(model)
    state, texts = lm.new_state(2, 32, 16), [list[int](), list[int]()]
    for sizes in ([9, 4], [6, 6]):
        tree = random_tree(rng, sizes)
        assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32
        paths = [path_to(tree, row, real_nodes(tree, row)[-1]) for row in range(2)]
        lm.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)


def module_states(lm: TreeLM) -> list[Tensor | None]:
    """List what transformers keeps on the modules of a RecurrentGemma."""
    blocks = [module for module in lm.model.modules() if hasattr(module, "conv1d_state")]
    assert len(blocks) == 2
    return [state for block in blocks for state in (block.conv1d_state, block.rg_lru.recurrent_states)]


def test_states_that_a_model_keeps_on_its_modules_are_neither_left_there_nor_touched() -> None:
    plain, lm = family_model("recurrent_gemma"), patched(family_model("recurrent_gemma"))
    oracle = family_model("recurrent_gemma")  # its forwards without a cache would wipe the states of the plain model
    other, *texts = random_texts(random.Random(2), [6, 14, 14])
    lm.prefill(lm.new_state(1, 64, 16), torch.tensor([other]))
    assert module_states(lm) == [None] * 4
    caches = [DynamicCache(config=plain.config) for _ in range(2)]
    steps = torch.tensor(texts).split([9, 1, 1, 1, 1, 1], dim=1)
    for place, tokens in enumerate(steps):  # a decode of two texts, with trees of another between its steps
        plain_logits, logits = (
            model(tokens, past_key_values=cache, use_cache=True).logits
            for model, cache in zip((plain, lm.model), caches, strict=True)
        )
        assert torch.equal(plain_logits, logits)
        held, prompts = module_states(lm), [other[: place + 1]]
        assert all(isinstance(tensor, Tensor) for tensor in held)
        state, tree = lm.new_state(1, 64, 16), random_tree(random.Random(place), [7])
        lm.prefill(state, torch.tensor(prompts))
        assert tree_error(oracle, prompts, tree, lm.verify(state, tree)) < FLOAT32
        lm.commit(state, *as_commit([[0]]))
        assert all(before is after for before, after in zip(held, module_states(lm), strict=True))


def test_a_failing_prefill_gives_the_modules_their_state_back() -> None:
    lm = patched(family_model("recurrent_gemma"))
    lm.model(torch.tensor([[1, 2, 3]]), use_cache=True)
    held = module_states(lm)
    lm.model.model.layers[2].temporal_block.rg_lru._rnn_scan = None
    with pytest.raises(TypeError, match="not callable"):
        lm.prefill(lm.new_state(1, 16, 4), torch.tensor([[5, 6]]))
    assert all(before is after for before, after in zip(held, module_states(lm), strict=True))


def test_a_decay_that_is_zero_in_the_models_dtype_stays_finite() -> None:
    model = family_model("recurrent_gemma")
    for name, parameter in model.named_parameters():
        if name.endswith("recurrent_param"):
            parameter.data[::2] = 1e3  # decays of e^-8000 to the power of a gate
    lm, texts = patched(model), random_texts(random.Random(4), [9])
    state, tree = lm.new_state(1, 32, 8), random_tree(random.Random(4), [8])
    lm.prefill(state, torch.tensor(texts))
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32
    path = path_to(tree, 0, 7)
    lm.commit(state, *as_commit([path]))
    texts = extended(texts, tree, [path])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize(("family", "positions"), [("recurrent_gemma", None), ("kimi_linear", 512)])
def test_a_model_without_a_longest_text_says_so(family: str, positions: int | None) -> None:
    assert patched(family_model(family)).max_length == positions


@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear"])
def test_latent_attention_keeps_latents_only(family: str) -> None:
    lm = patched(family_model(family))
    (stack,) = (stack for stack in lm.new_state(2, 64, 16).stacks.values() if isinstance(stack, LatentStack))
    # Of one layer and two sequences: rank 10 and 6 shared key channels, against 4 heads of 17 and 9 expanded.
    assert stack.num_bytes == 2 * (64 + 16) * (10 + 6) * 4


def test_the_stash_of_a_node_is_a_small_part_of_a_gated_delta_state() -> None:
    """Qwen3-Next-80B's sizes: 2 MiB of state a layer; DESIGN.md asks for at most 1/55, convolution inputs counted."""
    sizes = {"key_heads": 16, "heads": 32, "dk": 128, "dv": 128, "conv_width": 4}
    spec = DeltaSpec(**sizes, per_channel=False, dtype=torch.bfloat16, device=torch.device("meta"))
    stack = spec.allocate(1, 1, 4096, 64)
    stash = sum(getattr(stack, f"stash_{name}").nbytes for name in ("conv", "k", "u", "g")) / 64
    assert stack.state.nbytes == 32 * 128 * 128 * 4
    assert 1 / 60 < stash / stack.state.nbytes < 1 / 55


def multimodal_model() -> Any:
    """Make a Qwen3.5 with a vision tower."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=tiny_families_delta.DELTA, vision_config={**vision, **patches})
    return Qwen3_5ForConditionalGeneration(config).eval()


def test_the_language_model_of_a_multimodal_checkpoint_is_loaded_alone(tmp_path: Path) -> None:
    model = multimodal_model()
    model.save_pretrained(tmp_path)
    lm, (text,) = TreeLM.from_pretrained(tmp_path, device="cpu"), random_texts(random.Random(3), [9])
    assert lm.model.config.model_type == "qwen3_5_text"
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, torch.tensor([text[:8]]))
    logits = lm.verify(state, TokenTree.chain(torch.tensor([text[8:]])))
    assert relative_error(logits[0], fresh_logits(model, text)[8:]) < FLOAT32


def test_a_model_with_a_vision_tower_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="model family 'qwen3_5' is not supported; supported: .*qwen3_5_text"):
        TreeLM(multimodal_model())
