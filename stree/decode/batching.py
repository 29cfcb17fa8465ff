"""The requests of a generation, made of prompts and arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from stree.checks import check_sizes
from stree.decode.logits_processors import RowProcessors
from stree.decode.prompts import token_ids, token_lists
from stree.decode.request import Batch, GenerateArguments, Request
from stree.models.tree_lm import TreeLM

__all__ = ["batch_for"]

# One for all prompts, or a list; the fields of a request that arguments name.
OF_EACH_PROMPT = (
    "sampling", "max_new_tokens", "stop_token_ids", "seed", "stop_strings", "logprobs", "streamer", "observer",
)  # fmt: skip
PROCESSORS = ("repetition_penalty", "logits_processor")  # likewise; together they are its processors


def batch_for(lm: TreeLM, prompts: Any, arguments: GenerateArguments, most_prompts: int | None = None) -> Batch:
    """Make the requests of every prompt and size the batch; the prompts of a list are checked before anything runs.

    Args:
        lm: the target.
        prompts: see ``token_lists``.
        arguments: checked; see ``checked``.
        most_prompts: refuse more of them, and an iterator; None for any number.

    Raises:
        ValueError: no prompts, more tokens than a row holds, an iterator without a bound, or a list of parameters that
            has not one entry for each prompt.
        TypeError: prompts that are none, or a bound that is no integer.
    """
    max_batch, max_length, samples = arguments.max_batch, arguments.max_length, arguments.num_samples
    check_sizes(max_batch=max_batch, max_length=max_length)
    max_batch, max_length = (None if size is None else operator.index(size) for size in (max_batch, max_length))
    prompts = token_lists(prompts, arguments.attention_mask)
    bound = min((length for length in (max_length, lm.max_length) if length is not None), default=None)
    is_endless = isinstance(prompts, Iterator)
    if most_prompts is not None and (is_endless or len(prompts) > most_prompts):
        raise ValueError(f"a stream takes one prompt, got {'an iterator of them' if is_endless else len(prompts)}")
    each = _parameters(arguments, None if is_endless else len(prompts))
    make = partial(_request, lm, each, bound, samples)
    batch = partial(
        Batch, kinds=frozenset(each["sampling"]), most_stops=max(map(len, each["stop_token_ids"]), default=0),
        processor=RowProcessors() if any(_is_any(each[name]) for name in PROCESSORS) else arguments.processor,
    )  # fmt: skip
    repeated = (prompt for prompt in prompts for _ in range(samples))
    if is_endless:
        if max_batch is None or max_length is None:
            raise ValueError("an iterator of prompts needs max_batch and max_length, which bound the memory")
        each_one = _each(make, repeated)
        return batch(
            each_one, max_batch=max_batch, max_length=max_length, prompt_length=max_length, is_padded=True, refills=True
        )  # fmt: skip
    requests = [make(place, prompt) for place, prompt in enumerate(repeated)]
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    rows, lengths = min(max_batch or len(requests), len(requests)), {len(request.prompt) for request in requests}
    return batch(
        iter(requests), max_batch=rows, max_length=max_length or longest,
        prompt_length=max(lengths), is_padded=len(lengths) > 1, refills=rows < len(requests),
    )  # fmt: skip


def _parameters(arguments: GenerateArguments, count: int | None) -> dict[str, list[Any]]:
    """List the parameters of which each of ``count`` prompts may have its own; ``count`` is None for an iterator."""
    each = {name: _listed(name, getattr(arguments, name), count) for name in (*OF_EACH_PROMPT, *PROCESSORS)}
    samples = arguments.num_samples
    if count == 0:
        raise ValueError("generate needs at least one prompt, a list of token lists, got none")
    if samples > 1 and any(kind.is_greedy for kind in each["sampling"]):
        raise ValueError(f"num_samples of {samples} needs sampling: greedy texts of one prompt are equal")
    if _is_any(each["streamer"]):
        if count is None:
            raise ValueError("a streamer takes one prompt, got an iterator of them")
        if count * samples > len(each["streamer"]):
            raise ValueError(f"a streamer takes one prompt, got {count * samples}")
    return each


def _is_any(values: list[Any]) -> bool:
    """Whether one is not None."""
    return any(value is not None for value in values)


def _listed(name: str, value: Any, count: int | None) -> list[Any]:
    """List the values of a parameter: the one of all prompts, or one for each."""
    if not isinstance(value, list):
        return [value]
    if count is None:
        raise ValueError(f"{name} must be one for all prompts of an iterator, got a list of {len(value)}")
    if len(value) != count:
        raise ValueError(f"{name} must be one for all prompts or one for each of {count}, got a list of {len(value)}")
    return value


def _request(
    lm: TreeLM, each: Mapping[str, list[Any]], max_length: int | None, samples: int, place: int, prompt: Any
) -> Request:
    """Check a prompt, tokens of the vocabulary and as many as leave space for the new ones; return its request."""
    number = place // samples  # of the prompt
    own = {name: values[0] if len(values) == 1 else values[number] for name, values in each.items()}
    processors = tuple(one for one in map(own.pop, PROCESSORS) if one is not None)
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise TypeError(f"prompt {number} must be a list of tokens, got {type(prompt).__name__}")
    if not len(prompt):
        raise ValueError(f"prompt {number} is empty; every prompt needs at least one token")
    tokens = token_ids(f"prompt {number}", prompt)
    bad = next((token for token in tokens if not 0 <= token < lm.vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt {number} has token {bad}, outside the vocabulary of {lm.vocab_size}")
    new = own["max_new_tokens"]
    if max_length is not None and len(prompt) + new > max_length:
        raise ValueError(f"prompt {number} of {len(prompt)} tokens plus {new} new ones exceeds max_length {max_length}")
    return Request(tokens, sequence=place, processors=processors, **own)


def _each(make: Callable[[int, Any], Request], prompts: Iterator[Any]) -> Iterator[Request]:
    """Make requests of prompts as they come: one that cannot be run must not end the others."""
    for place, prompt in enumerate(prompts):
        try:
            yield make(place, prompt)
        except (TypeError, ValueError) as problem:
            try:
                tokens = token_ids(f"prompt {place}", prompt)
            except TypeError:
                tokens = []
            yield Request(tokens, sequence=place, problem=f"refused: {problem}")
