"""Every argument of ``generate`` and every field of its config has its effect under the hook, has none, or is refused.

The tables name them all: a release of transformers with a further one makes the first test fail.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from helpers.hooked_generate import PROMPTS, count_forwards, hooked, left_padded, plain, target
from helpers.tiny_family_models import family_model
from transformers import CompileConfig, GenerationConfig, GenerationMixin, WatermarkingConfig

import stree

Options = dict[str, Any]
HOOK: Options = {"custom_generate": stree.custom_generate}
EOS: Options = {"eos_token_id": [*range(0, 97, 2)]}

# With each of these the text is transformers', which is not the one without.
HONOURED: dict[str, Options] = {
    "max_length": {"max_length": 16, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": 20, **EOS},
    "min_new_tokens": {"min_new_tokens": 9, **EOS},
    "max_time": {"max_time": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[7], 20.0]]},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(10, 60)]},
    "forced_bos_token_id": {"forced_bos_token_id": 4, "input_ids": torch.tensor([[5]]), "attention_mask": None},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": [10, 11, 12]},
    "suppress_tokens": {"suppress_tokens": [*range(50)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(90)]},
    "sequence_bias": {"sequence_bias": [[[7], 20.0], [[7, 9], 40.0]]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=40.0)},
    "eos_token_id": EOS,
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
}  # fmt: skip
# With each of these the scores that a token is drawn by are transformers', which are not those without.
SCORED: Options = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "top_h": 0.5, "typical_p": 0.3,
    "epsilon_cutoff": 0.02, "eta_cutoff": 0.5, "renormalize_logits": True, "remove_invalid_values": True,
}  # fmt: skip
# Tested elsewhere: what is returned, and the ends of the rows of a batch; a text without a prompt is below.
ELSEWHERE = {
    "do_sample", "output_scores", "return_dict_in_generate", "pad_token_id", "bos_token_id",
}  # fmt: skip
# Without effect on the text of greedy search and sampling, in transformers too.
NEUTRAL: Options = {
    "early_stopping": True, "length_penalty": 2.0, "diversity_penalty": 0.5, "num_beam_groups": 1, "low_memory": True,
    "use_cache": False, "cache_config": {"backend": "quanto"}, "max_cache_len": 99, "decoder_start_token_id": 3,
    "compile_config": CompileConfig(), "disable_compile": True, "continuous_batching_config": None,
    "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.1,
    "max_matching_ngram_size": 3, "assistant_lookbehind": 3, "target_lookbehind": 3, "transformers_version": "5.17.0",
}  # fmt: skip
REFUSED: dict[str, tuple[Options, str]] = {
    "num_beams": ({"num_beams": 2}, "got beam search"),
    "use_mtp": ({"use_mtp": True}, "got assisted generation"),
    "prompt_lookup_num_tokens": ({"prompt_lookup_num_tokens": 3}, "got assisted generation"),
    "assistant_early_exit": ({"assistant_early_exit": 1}, "got assisted generation"),
    "is_assistant": ({"is_assistant": True}, "does not give drafts .*, got is_assistant=True"),
    "assistant_ensemble_weight": ({"assistant_ensemble_weight": 0.5}, "got assistant_ensemble_weight=0.5"),
    "speculation_type": ({"speculation_type": "dflash"}, "got speculation_type=dflash"),
    "cache_implementation": ({"cache_implementation": "static"}, "got cache_implementation=static"),
    "prefill_chunk_size": ({"prefill_chunk_size": 4}, "got prefill_chunk_size=4"),
    "guidance_scale": ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "output_attentions": ({"output_attentions": True}, "got output_attentions=True"),
    "output_hidden_states": ({"output_hidden_states": True}, "got output_hidden_states=True"),
    "output_logits": ({"output_logits": True}, "got output_logits=True"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "got contrastive search"),
    "dola_layers": ({"dola_layers": "low"}, "got dola generation"),
    "constraints": ({"constraints": [1], "num_beams": 2}, "got constrained beam search"),
    "force_words_ids": ({"force_words_ids": [[3]], "num_beams": 2}, "got constrained beam search"),
    # By transformers, which does not pass a tokenizer on; the hook's own stop_strings= has an effect.
    "stop_strings": ({"generation_config": GenerationConfig(stop_strings=["a"])}, "stop strings"),
    "token_healing": ({"token_healing": True}, "token healing"),
}  # fmt: skip
ARGUMENTS: dict[str, tuple[Options, str] | None] = {
    "assistant_model": ({"assistant_model": target("llama")}, "takes a draft model as drafter=, not as assistant_mod"),
    "synced_gpus": ({"synced_gpus": True}, "does not keep processes in step, got synced_gpus=True"),
    "negative_prompt_ids": ({"negative_prompt_ids": torch.tensor([[3]])}, "got negative_prompt_ids"),
    "negative_prompt_attention_mask": ({"negative_prompt_attention_mask": torch.tensor([[1]])}, "negative_prompt_at"),
    **dict.fromkeys(("self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "kwargs")),
    **dict.fromkeys(("prefix_allowed_tokens_fn", "streamer", "custom_generate")),
}  # fmt: skip
FAMILIES = ("lfm2", "llama")  # for which transformers has assisted generation


def test_every_argument_and_every_field_is_in_a_table() -> None:
    tables = (HONOURED, SCORED, ELSEWHERE, NEUTRAL, REFUSED)
    named = [name for table in tables for name in table]
    assert sorted(named) == sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
    assert set(inspect.signature(GenerationMixin.generate).parameters) == set(ARGUMENTS)


def text_of(options: Options) -> list[int]:
    """Return the new tokens under the hook, of all returned sequences."""
    out = hooked(target(), PROMPTS[:1], **options)
    width = 1 if "input_ids" in options else len(PROMPTS[0])
    return [token for row in out.tolist() for token in row[width:]]


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_has_transformers_effect(name: str) -> None:
    options = HONOURED[name]
    prompt = options["input_ids"][0].tolist() if "input_ids" in options else PROMPTS[0]
    others = {key: value for key, value in options.items() if key not in ("input_ids", "attention_mask")}
    expected = plain(target(), prompt, **others)
    if name == "num_return_sequences":
        expected = expected * 2
    assert text_of(options) == expected
    without = {key: value for key, value in others.items() if key not in (name, "max_new_tokens")}
    assert plain(target(), prompt, **without) != expected, "the value changes nothing"


@pytest.mark.parametrize("name", SCORED)
def test_the_scores_of_a_sampled_token_are_transformers(name: str) -> None:
    options: Options = {"max_new_tokens": 1, "do_sample": True, "output_scores": True, "return_dict_in_generate": True}
    options |= {"sequence_bias": [[[3], torch.inf]]} if name == "remove_invalid_values" else {}
    common = {**options, **left_padded(PROMPTS[:1]), "top_k": 0, "pad_token_id": 0}
    given = common | {name: SCORED[name]}
    found, expected = (target().generate(**given, **hook).scores[0] for hook in (HOOK, {}))
    assert torch.allclose(found, expected, atol=1e-4)
    if name != "remove_invalid_values":  # without it transformers cannot draw
        assert not torch.allclose(target().generate(**common, **HOOK).scores[0], expected, atol=1e-2)


def test_a_text_without_a_prompt_begins_with_the_bos_token() -> None:
    common = {"max_new_tokens": 6, "do_sample": False, "bos_token_id": 5, "eos_token_id": None, "pad_token_id": 0}
    out = target().generate(**HOOK, **common)
    assert out.tolist() == target().generate(**common).tolist()


@cache
def text_without_options() -> list[int]:
    return plain(target(), PROMPTS[0])


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_without_effect_in_transformers_has_none(name: str) -> None:
    expected = plain(target(), PROMPTS[0], **{name: NEUTRAL[name]})
    assert text_of({name: NEUTRAL[name]}) == expected == text_without_options()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*REFUSED, *(name for name, case in ARGUMENTS.items() if case)])
def test_what_would_have_no_effect_is_refused_by_name(name: str, family: str) -> None:
    model, (options, message) = family_model(family), (REFUSED | ARGUMENTS)[name]  # type: ignore[misc]

    def call() -> None:
        with pytest.raises((NotImplementedError, ValueError), match=message):
            hooked(model, PROMPTS[:1], **options)

    assert count_forwards(model, call)[1] == 0


def test_processes_that_need_not_keep_in_step_are_no_reason_to_refuse() -> None:
    assert text_of({"synced_gpus": False}) == plain(target(), PROMPTS[0])
