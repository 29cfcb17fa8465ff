"""``stree.custom_generate``: tree decoding behind transformers' own ``model.generate``.

transformers prepares inputs, processors and stopping criteria; options that cannot be lossless here are refused by name
before the model runs.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from stree.decode.batching import batch_for
from stree.decode.failures import GenerationError
from stree.decode.grammar import Grammar
from stree.decode.request import Streamer
from stree.decode.settings import Settings
from stree.drafters import Drafter
from stree.generation import run
from stree.growth import Growth
from stree.integrations.transformers_processors import BatchProcessor, Stops, TextObserver, scores_of
from stree.models.families import CACHE_ARGUMENTS
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import Verifier

__all__ = ["custom_generate", "tree_lm"]

# What generate() passes beside its named arguments; everything else would change what the model computes.
KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHE_ARGUMENTS}
# Options of GenerationConfig that ask for more than token ids, scores and the distribution of the plain model.
REFUSED_OPTIONS = {
    "output_logits": "raw logits", "output_attentions": "attentions", "output_hidden_states": "hidden states",
    "cache_implementation": "a cache of another kind", "prefill_chunk_size": "prefill in transformers' own chunks",
    "is_assistant": "drafts for transformers' assisted generation",
    "assistant_ensemble_weight": "a mixture of target and draft", "speculation_type": "transformers' own speculation",
}  # fmt: skip
# Arguments of generate() that it passes to no callable.
REFUSED_ARGUMENTS = {
    "assistant_model": "takes a draft model as drafter=, not as assistant_model=",
    "synced_gpus": "does not keep processes in step, got synced_gpus=True",
    "negative_prompt_ids": "has no classifier-free guidance, got negative_prompt_ids",
    "negative_prompt_attention_mask": "has no classifier-free guidance, got negative_prompt_attention_mask",
}
_patching = threading.Lock()  # threads that share a model get one TreeLM


@dataclass
class TreeDecoderOnlyOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What ``generate`` returns with ``return_dict_in_generate``, and the statistics of ``stree.generate``."""

    stats: dict[str, Any] | None = None


@torch.no_grad()
def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: str | PreTrainedModel | TreeLM | Drafter = "suffix",
    growth: Growth | str | None = None,
    budget: int | str | None = None,
    verifier: str | Verifier = "auto",
    seed: int | None = None,
    streamer: Streamer | None = None,
    stop_strings: str | Sequence[str] | None = None,
    grammar: Grammar | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode with token trees: ``model.generate(**inputs, custom_generate=stree.custom_generate, drafter=...)``.

    The text is distributed as that of plain ``model.generate``; greedy, it is the text of every prompt run alone.
    Everything that transformers expresses as logits processors (temperature, top-k, top-p, min-p, penalties, minimum
    lengths, your own) acts on every node of a tree along the node's own path, for the target and for a draft model; it
    must depend on its arguments only, as it is called with texts that are never emitted.  Processors see the columns
    that they would see in ``generate``, left padding included.  Stopping criteria are called with one sequence at a
    time, after each of its tokens.

    transformers does not pass ``tokenizer`` on to a callable.  So stop strings and grammars use the tokenizer of the
    model's own checkpoint, unless another one is bound beforehand:

        custom_generate=functools.partial(stree.custom_generate, tokenizer=tokenizer)

    Args:
        model: a model of a supported family; patched at the first call, its plain ``generate`` stays as it was.
        input_ids: int64[batch, length], left-padded where ``attention_mask`` says so.
        logits_processor: prepared by transformers, those of sampling included.
        stopping_criteria: prepared by transformers.
        generation_config: prepared by transformers.
        drafter: "suffix" (repetitions of the text), "none" (plain decoding), a smaller model of the same vocabulary,
            or whatever else ``stree.drafters.load`` takes.
        growth: the shape of a draft model's trees, or its name; None for its default.
        budget: most nodes a step, root included, or "auto"; as for ``stree.generate``.
        verifier: as for ``stree.accept``.
        seed: of the random numbers; None draws one from torch's, so that ``torch.manual_seed`` decides.
        streamer: receives tokens as they are emitted; one prompt only.
        stop_strings: strings that end a text, as in ``generate``.
        grammar: of the new tokens, as in ``stree.generate``; processors are called behind it.
        tokenizer: that stop strings and grammars need; None for that of the model's checkpoint.
        **model_kwargs: what transformers prepared for the model's forward; only what token ids imply is accepted.

    Returns:
        What ``generate`` returns: int64[batch, length + new] with finished sequences padded, or with
        ``return_dict_in_generate`` a ``GenerateDecoderOnlyOutput``, whose scores are zero after a sequence's end,
        whose cache is None, and which has the statistics of ``stree.generate`` as ``stats``.

    Raises:
        NotImplementedError: a family, generation mode, input or option that is not supported; ``assistant_model``, in
            whose place ``drafter`` is, and ``synced_gpus``.
        ValueError: right-padded prompts, a draft model of another vocabulary or on another device, stop strings or a
            grammar without a tokenizer.
        GenerationError: a grammar could not be followed; it carries the texts.
    """
    call = _call_of_generate()
    _check_call(call)
    _check_config(model, generation_config)
    mask = _check_inputs(input_ids, model_kwargs)
    lm = tree_lm(model)
    drafts = tree_lm(drafter) if isinstance(drafter, PreTrainedModel) else drafter
    settings = Settings(lm, drafts, growth=growth, budget=budget, verifier=verifier)
    width = input_ids.shape[1]
    lengths = mask.sum(1).tolist()
    prompts = [row[width - length :] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
    stops = Stops.of(stopping_criteria)
    padding = getattr(generation_config, "_pad_token_tensor", None)
    if padding is None and len(prompts) > 1 and (stops.criteria or stop_strings or grammar):
        raise ValueError("sequences of a batch may end at different lengths under these criteria; set pad_token_id")
    keeps_scores = bool(generation_config.return_dict_in_generate and generation_config.output_scores)
    observers = None
    if stops.criteria or keeps_scores:
        observers = [TextObserver(stops.criteria, row, keeps_scores) for row in input_ids]
    is_sampled = bool(generation_config.do_sample)
    if seed is None:
        seed = int(torch.randint(1 << 62, ())) if is_sampled else 0
    batch = batch_for(
        lm, prompts, sampling=Sampling(1.0 if is_sampled else 0.0),  # the temperature is one of the processors
        processor=BatchProcessor(logits_processor, input_ids, lengths) if len(logits_processor) else None,
        max_new_tokens=stops.max_length - width, stop_token_ids=stops.token_ids, seed=seed, observer=observers,
        streamer=_callers_streamer(call) if streamer is None else streamer, stop_strings=stop_strings or None,
        tokenizer=_tokenizer(model) if (stop_strings or grammar) and not tokenizer else tokenizer, grammar=grammar,
    )  # fmt: skip
    output = run(settings, batch)
    if problem := next((reason for reason in output.stats["finish_reasons"] if reason.startswith("error")), None):
        raise GenerationError(problem, output)
    new = [text[length:] for text, length in zip(output.sequences, lengths, strict=True)]
    sequences = torch.cat([input_ids, _padded(new, 0 if padding is None else int(padding)).to(input_ids.device)], 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores = scores_of(observers, max(map(len, new))) if observers is not None and keeps_scores else None
    return TreeDecoderOnlyOutput(sequences=sequences, scores=scores, stats=output.stats)


class _AfterPrompt:
    """A streamer that has received the prompt already."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer, self._has_prompt, self.end = streamer, False, streamer.end

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True


def _call_of_generate() -> Mapping[str, Any]:
    """Return the arguments of the call of ``generate`` that runs the hook, which transformers passes to no callable."""
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code is not generate:
        caller = caller.f_back
    return {} if caller is None else caller.f_locals


def _callers_streamer(call: Mapping[str, Any]) -> Streamer | None:
    """Return the streamer of a call of ``generate``, which has received the prompt; its reader waits for the rest."""
    streamer = call.get("streamer")
    return None if streamer is None else _AfterPrompt(streamer)


def _check_call(call: Mapping[str, Any]) -> None:
    """Refuse arguments of ``generate`` that would have no effect."""
    for name, reason in REFUSED_ARGUMENTS.items():
        if call.get(name) is not None and call[name] is not False:
            raise NotImplementedError(f"custom_generate {reason}")


def _tokenizer(model: PreTrainedModel) -> Any:
    """Load the tokenizer of a model's checkpoint."""
    try:
        return AutoTokenizer.from_pretrained(model.config._name_or_path)
    except Exception as error:
        how = "custom_generate=functools.partial(stree.custom_generate, tokenizer=tokenizer)"
        raise ValueError(
            f"stop_strings and grammar need a tokenizer, which transformers passes to no callable: {how}"
        ) from error


def _padded(texts: list[list[int]], filler: int) -> Tensor:
    """Token lists as int64[batch, longest], padded on the right."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[filler] * (longest - len(text))] for text in texts], dtype=torch.long)


def _check_config(model: PreTrainedModel, config: GenerationConfig) -> None:
    """Refuse modes and options with a distribution other than the model's own."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"custom_generate decodes decoder-only models; {type(model).__name__} has an encoder")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise NotImplementedError(
            f"custom_generate does greedy search and sampling, got {mode.value.replace('_', ' ')}"
        )
    if config.guidance_scale not in (None, 1, 1.0):
        raise NotImplementedError(f"custom_generate has no classifier-free guidance, got {config.guidance_scale=}")
    for option, meaning in REFUSED_OPTIONS.items():
        if getattr(config, option, None):
            raise NotImplementedError(
                f"custom_generate does not give {meaning}, got {option}={getattr(config, option)}"
            )


def _check_inputs(input_ids: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Refuse inputs beside token ids; return int64[batch, length], 1 where a token counts."""
    if not (isinstance(input_ids, Tensor) and input_ids.dim() == 2 and not input_ids.is_floating_point()):
        raise TypeError(f"input_ids must be a tensor int64[batch, length], got {input_ids!r:.80}")
    unknown = sorted(name for name, value in inputs.items() if name not in KNOWN_INPUTS and value is not None)
    if unknown:
        raise NotImplementedError(f"custom_generate takes token ids only, got {', '.join(unknown)}")
    for name in CACHE_ARGUMENTS:
        if getattr(inputs.get(name), "_is_user_defined", False):
            raise NotImplementedError(f"custom_generate keeps its own state and cannot go on from {name}; leave it out")
    mask: Tensor | None = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    elif mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask must be of the shape {[*input_ids.shape]} of input_ids, got {[*mask.shape]}")
    mask = (mask != 0).long()
    if not mask.shape[1]:
        raise ValueError("every prompt needs at least one token, got input_ids without columns")
    if bool((mask.diff(dim=1) < 0).any()) or not bool(mask[:, -1].all()):
        raise ValueError("prompts must be padded on the left; set the tokenizer's padding_side to 'left'")
    positions: Tensor | None = inputs.get("position_ids")
    if positions is not None and bool(((positions != mask.cumsum(1) - 1) & (mask != 0)).any()):
        raise NotImplementedError("custom_generate counts positions from each prompt's first token; got position_ids")
    return mask


def tree_lm(model: PreTrainedModel) -> TreeLM:
    """Patch a model, or return the ``TreeLM`` of an earlier call where the model is unchanged."""
    with _patching:
        known: TreeLM | None = model.__dict__.get("_stree")
        if known is None or known.model is not model or known.change is not None:
            known = TreeLM(model)
            model.__dict__["_stree"] = known  # not through setattr: a TreeLM is no part of the model
        return known
