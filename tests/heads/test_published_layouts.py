"""Every published layout of a draft head loads by its folder alone, with the ``architectures`` of its publisher.

Configs have the entries of the published ones, nested as there, at small sizes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.plain_heads import plain_block
from helpers.tiny_heads import (
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    MASK,
    RANK,
    TOP,
    block_tensors,
    drawn,
    layer_shapes,
    tiny_target,
)
from helpers.tiny_models import relative_error
from safetensors.torch import save_file
from torch import Tensor

import stree
from stree.drafters import HeadDrafter
from stree.heads import OneShotHead, head_layout

Config = dict[str, Any]
TARGET = tiny_target("llama")
HIDDEN: int = TARGET.model.get_input_embeddings().weight.shape[1]
VOCAB, CLOSE = 97, 1e-4
SIZES: Config = {
    "attention_bias": False, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 48, "head_dim": DIM,
    "max_position_embeddings": 512, "num_attention_heads": HEADS, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "num_key_value_heads": KV_HEADS, "tie_word_embeddings": False, "vocab_size": VOCAB, "model_type": "qwen3",
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}  # fmt: skip
FULL: Config = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
SLIDING: Config = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": True}
READ: Config = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}  # the outputs of the first two layers
MARKOV: Config = {
    "markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
SELECTOR: Config = {
    "conv_group_size": GROUP, "conv_kernel_size": 2, "selector_rank": RANK, "selector_top_k": TOP,
}  # fmt: skip
# speculators: layers apart, our numbers of the target's layers.
LAYERS: Config = {"transformer_layer_config": {**SIZES, **FULL}, "draft_vocab_size": VOCAB, "mask_token_id": MASK}
LAYERS |= {"aux_hidden_state_layer_ids": [1, 2], "block_size": 5, "speculators_config": {"algorithm": "dflash"}}
DSPARK: Config = {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}


def proposing(tokens: int) -> Config:
    return {"algorithm": "dspark", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}


# By publisher: kind of tensors, config.json, whether slot k predicts the token at k + 1, options of the definition.
ONE_SHOT: dict[str, tuple[str, Config, bool, Config]] = {
    "z-lab DFlash": (
        "dflash", {**SIZES, **FULL, "architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 2,
                   "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dflash_config": READ}, False, {},
    ),
    "z-lab DFlash, all nested": (
        "dflash", {**SIZES, **FULL, "architectures": ["DFlashDraftModel"], "dflash_config": {**READ, "block_size": 5}},
        False, {},
    ),
    "z-lab DFlash2": (
        "dflash2", {**SIZES, **SLIDING, "architectures": ["DFlash2DraftModel"], "is_causal": False,
                    "num_target_layers": 2, "max_window_layers": 2,
                    "dflash_config": {**READ, **SELECTOR, "block_size": 5, "final_logit_softcapping": 20.0,
                                      "output_multiplier": 0.2}}, False, {"window": 4},
    ),
    "DeepSpec DSpark": (
        "dspark", {**SIZES, **FULL, **READ, **MARKOV, "architectures": ["Qwen3DSparkModel"], "block_size": 5,
                   "num_target_layers": 2, "num_anchors": 512}, True, {},
    ),
    "DeepSpec DFlash": (
        "dflash", {**SIZES, **FULL, **READ, "architectures": ["Qwen3DSparkModel"], "block_size": 5, "markov_rank": 0,
                   "num_target_layers": 2, "num_anchors": 512, "enable_confidence_head": False}, True, {},
    ),
    "SpecForge DSpark": (
        "dspark", {**SIZES, **FULL, **MARKOV, "architectures": ["DSparkDraftModel"], "block_size": 5,
                   "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "num_target_layers": 2,
                   "dflash_config": {**READ, **MARKOV, "attention_mode": "gqa", "projector_type": "dspark"}}, True, {},
    ),
    "LiquidAI DSpark": (
        "dspark", {**SIZES, **MARKOV, "architectures": ["Lfm2DSparkDraftModel"], "block_size": 5,
                   "layer_types": ["full_attention"] * 2, "rope_is_neox_style": False,
                   "dflash_config": {**READ, "num_target_layers": 2}}, True, {"neighbours": True},
    ),
    "speculators DFlash": (
        "dflash", {**LAYERS, "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}, False, {},
    ),
    "speculators DFlash2": (
        "dflash2", {**LAYERS, **SELECTOR, "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"},
        False, {},
    ),
    "speculators DSpark": (
        "dspark", {**LAYERS, **MARKOV, **DSPARK, "speculators_config": proposing(5)},
        True, {},
    ),
    "speculators DSpark, without a prediction at the anchor": (
        "dspark", {**LAYERS, **MARKOV, **DSPARK, "sample_from_anchor": False}, False, {},
    ),
    "speculators DSpark, before sample_from_anchor": (
        "dspark", {**LAYERS, **MARKOV, **DSPARK, "speculators_config": proposing(4)},
        False, {},
    ),
}  # fmt: skip
COPIES = ("DeepSpec DSpark", "DeepSpec DFlash")  # their checkpoints hold the target's embedding and output head


def save(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def save_one_shot(folder: Path, name: str) -> Path:
    kind, config, _, _ = ONE_SHOT[name]
    tensors = block_tensors(kind, HIDDEN, VOCAB)
    if name in COPIES:
        tensors["embed_tokens.weight"] = TARGET.model.get_input_embeddings().weight.detach()
        tensors["lm_head.weight"] = TARGET.model.get_output_embeddings().weight.detach()
    return save(folder, config, tensors)


@pytest.mark.parametrize("name", ONE_SHOT)
def test_a_one_shot_head_is_that_of_the_definition(name: str, tmp_path: Path) -> None:
    kind, config, predicts_next, options = ONE_SHOT[name]
    head = stree.heads.load(save_one_shot(tmp_path, name), TARGET)
    assert isinstance(head, OneShotHead)
    assert head.hidden_layers == (1, 2) and head.num_drafted == 5 - (not predicts_next)
    assert (head.config.selector is None, head.config.markov is None) == (kind != "dflash2", kind != "dspark")
    text, anchor = torch.tensor([[7, 3, 9, 40, 11, 5, 8]]), 21
    features = TARGET.prefill(TARGET.new_state(1), text, hidden_layers=[1, 2])[1].flatten(2)
    embedded = TARGET.model.get_input_embeddings().weight.detach()[[anchor] + [MASK] * 4]
    hidden = plain_block(block_tensors(kind, HIDDEN, VOCAB), features[0], embedded, **options)
    expected = TARGET.model.get_output_embeddings()(hidden).detach()
    nested = config.get("dflash_config", {})
    expected = expected * nested.get("output_multiplier", 1.0)
    if cap := nested.get("final_logit_softcapping"):
        expected = cap * (expected / cap).tanh()
    out = head.draft(text, features, torch.tensor([anchor]))
    assert relative_error((out if isinstance(out, Tensor) else out[0])[0], expected) < CLOSE


EAGLE_SIZES: Config = {**SIZES, "num_hidden_layers": 1, "model_type": "llama"}
# config.json, prefix of the layer's tensors, layers of the target that are read: None for EAGLE's default.
EAGLE3: dict[str, tuple[Config, str, list[int] | None]] = {
    "EAGLE": ({**EAGLE_SIZES, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}, "midlayer.", None),
    "SpecForge": (
        {**EAGLE_SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}},
        "midlayer.", [1, 2, 3],
    ),
    "AngelSlim": (
        {**EAGLE_SIZES, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 40}, "midlayer.", None,
    ),
    "DeepSpec": (
        {**SIZES, "num_hidden_layers": 1, "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2],
         "ttt_length": 7, "step_loss_decay": 1.0, "draft_num_hidden_layers": 1, "num_target_layers": 4},
        "layers.0.", [1, 2, 3],
    ),
    "speculators": (
        {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "draft_vocab_size": 40,
         "transformer_layer_config": EAGLE_SIZES, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "layers.0.", [1, 2, 3],
    ),
}  # fmt: skip


def save_eagle3(folder: Path, name: str) -> Path:
    config, prefix, _ = EAGLE3[name]
    size, is_whole = HIDDEN, name == "DeepSpec"
    layer = {**layer_shapes(size, HEADS * DIM, KV_HEADS * DIM, 2 * size), "hidden_norm": [size]}
    shapes: dict[str, Sequence[int]] = {"fc": [size, 3 * size], "norm": [size], "lm_head": [40, size]}
    shapes |= {f"{prefix}{part}": shape for part, shape in layer.items()}
    if is_whole:
        shapes |= {"lm_head": [VOCAB, size], "embed_tokens": [VOCAB, size]}
        shapes |= {f"{prefix}self_attn.{norm}": [DIM] for norm in ("q_norm", "k_norm")}
    tensors = drawn({f"{part}.weight": shape for part, shape in shapes.items()})
    if not is_whole:
        tensors |= {"d2t": torch.arange(40), "t2d": torch.arange(VOCAB) % 2 == 0}
    return save(folder, config, tensors)


@pytest.mark.parametrize("name", EAGLE3)
def test_an_eagle3_head_reads_the_layers_that_its_config_names(name: str, tmp_path: Path) -> None:
    target = tiny_target("bamba")
    head = stree.heads.load(save_eagle3(tmp_path, name), target)
    assert list(head.hidden_layers) == (EAGLE3[name][2] or [2, target.num_layers // 2, target.num_layers - 3])


@pytest.mark.parametrize("name", slow_unless(("z-lab DFlash", "EAGLE").__contains__, [*ONE_SHOT, *EAGLE3]))
def test_a_published_head_is_a_drafter_that_changes_no_text(name: str, tmp_path: Path) -> None:
    target = TARGET if name in ONE_SHOT else tiny_target("bamba")
    folder = save_one_shot(tmp_path, name) if name in ONE_SHOT else save_eagle3(tmp_path, name)
    assert head_layout(folder) is not None
    drafter = stree.drafters.load(str(folder), target)
    assert isinstance(drafter, HeadDrafter)
    expected = stree.generate(target, [[5, 6, 7, 5]], "none", max_new_tokens=8)
    found = stree.generate(target, [[5, 6, 7, 5]], drafter, budget=6, max_new_tokens=8)
    assert found.sequences == expected.sequences and found.stats["draft_calls"] > 0


UNKNOWN: dict[str, Config] = {
    "Gemma4DSparkModel": {**SIZES, **READ, "model_type": "gemma4_text"},
    "Qwen35DSparkModel": {**SIZES, **READ, **MARKOV},
    "MuseGlimmerAssistantModel": {**SIZES, **READ, "block_size": 16},
    "PEagleDraftModel": {**EAGLE_SIZES, "draft_vocab_size": 40},
    "SomeDraftModel": {**SIZES, "dflash_config": READ},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_head_of_another_architecture_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    save(tmp_path, {**UNKNOWN[name], "architectures": [name]}, block_tensors("dflash", HIDDEN, VOCAB))
    for load in (stree.heads.load, stree.drafters.load):
        with pytest.raises(
            NotImplementedError, match=f"has architectures \\['{name}'\\]; known are LlamaForCausalLMEag"
        ):
            load(tmp_path, TARGET)
