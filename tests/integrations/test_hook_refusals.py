"""What the hook refuses before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.hooked_generate import PROMPTS, count_forwards, hooked, small, target
from helpers.tiny_models import tiny_model
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)

import stree
from stree.drafters import FusedDrafter, ModelDrafter, SuffixDrafter
from stree.models.families import cache_argument

CACHE = cache_argument(type(target()))  # its name depends on the release
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "beam": ({"num_beams": 2}, NotImplementedError, "does greedy search and sampling, got beam search"),
    "beam-sample": ({"num_beams": 2, "do_sample": True}, NotImplementedError, "got beam sample"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, NotImplementedError, "got contrastive search"),
    "dola": ({"dola_layers": "low"}, NotImplementedError, "got dola generation"),
    "constrained": ({"force_words_ids": [[3]], "num_beams": 2}, NotImplementedError, "got constrained beam search"),
    "guidance": ({"guidance_scale": 1.5}, NotImplementedError, "has no classifier-free guidance, got .*1.5"),
    "logits": ({"output_logits": True}, NotImplementedError, "does not give raw logits, got output_logits=True"),
    "attentions": ({"output_attentions": True}, NotImplementedError, "does not give attentions"),
    "hidden-states": ({"output_hidden_states": True}, NotImplementedError, "does not give hidden states"),
    "cache-kind": ({"cache_implementation": "static"}, NotImplementedError, "does not give a cache of another kind"),
    "cache": ({CACHE: DynamicCache()}, NotImplementedError, f"cannot go on from {CACHE}"),
    "positions": (
        {"position_ids": torch.arange(1, 12)[None]}, NotImplementedError, "counts positions from each prompt's first",
    ),
    "right-padding": (
        {"attention_mask": torch.tensor([[1] * 8 + [0] * 3])}, ValueError, "prompts must be padded on the left",
    ),
    "nothing": (
        {"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, ValueError,
        "every prompt needs at least one token, got input_ids without columns",
    ),
    "hole": (
        {"attention_mask": torch.tensor([[1, 0] + [1] * 9])}, ValueError, "prompts must be padded on the left",
    ),
    "watermark": (
        {"logits_processor": [SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 100, 0, 8, torch.device("cpu"))]},
        NotImplementedError, "cannot run SynthIDTextWatermarkLogitsProcessor along the paths of a tree",
    ),
    "drafter-name": ({"drafter": "sufix"}, ValueError, "drafter must be 'suffix', 'none', .* got 'sufix'"),
    "drafter-type": ({"drafter": 3}, TypeError, "drafter must be .*derived from stree.drafters.Drafter, got 3"),
    "budget": ({"budget": 0}, ValueError, "budget must be at least 1, got 0"),
    "verifier": ({"verifier": "typical"}, ValueError, "verifier must be one of"),
    "unnamed": ({"depth": 4}, ValueError, r"not used by the model: \['depth'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_before_anything_runs(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    def call() -> None:
        with pytest.raises(error, match=message):
            hooked(target(), PROMPTS[:1], **arguments)

    assert count_forwards(target(), call)[1] == 0


def test_models_that_cannot_take_part_are_refused() -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    encoder = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(NotImplementedError, match="decoder-only models; T5ForConditionalGeneration has an encoder"):
        encoder.generate(torch.tensor([[1, 2]]), custom_generate=stree.custom_generate, max_new_tokens=2)
    with pytest.raises(ValueError, match="one vocabulary: the drafter has 11 tokens, the target 97"):
        hooked(target(), PROMPTS, drafter=small("mamba2"))
    elsewhere = tiny_model("mamba2").to("meta")
    with pytest.raises(ValueError, match="must be on one device, got meta and cpu"):
        hooked(target(), PROMPTS, drafter=elsewhere)
    with pytest.raises(ValueError, match="must be on one device"):
        hooked(target(), PROMPTS, drafter=FusedDrafter(ModelDrafter(stree.TreeLM(elsewhere)), SuffixDrafter()))
    with pytest.raises(NotImplementedError, match="takes token ids only, got inputs_embeds, pixel_values"):
        stree.custom_generate(
            target(), torch.tensor([[1]]), LogitsProcessorList(), [], target().generation_config,
            pixel_values=torch.zeros(1), inputs_embeds=torch.zeros(1), token_type_ids=None,
        )  # fmt: skip
