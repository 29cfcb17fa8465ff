"""The requests of a generation, made of prompts and the options of their texts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stree.checks import check_counts, check_sizes
from stree.decode.logits_processors import NodeProcessor, RowProcessors
from stree.decode.prompts import token_ids, token_lists
from stree.decode.request import Batch, Request
from stree.decode.stop_strings import TokenBytes
from stree.models.tree_lm import TreeLM

__all__ = ["batch_for"]

MOST_TEXTS = 1 << 20  # of a list of prompts, each of which is held from the beginning


def batch_for(
    lm: TreeLM, prompts: Any, *, attention_mask: Any = None, num_samples: int = 1, max_batch: int | None = None,
    max_length: int | None = None, processor: NodeProcessor | None = None, most_prompts: int | None = None,
    **options: Any,
) -> Batch:  # fmt: skip
    """Make the requests of every prompt and size the batch; the prompts of a list are checked before anything runs.

    Args:
        lm: the target.
        prompts: see ``token_lists``.
        attention_mask: likewise.
        num_samples: texts of every prompt.
        max_batch: as for ``generate``.
        max_length: likewise.
        processor: processes the logits of many nodes in place of processors of each sequence, or None.
        most_prompts: refuse more of them, and an iterator; None for any number.
        options: those of ``Request.of``, each one for all prompts, or a list of one for each.

    Raises:
        ValueError: what ``Request`` refuses, no prompts, an iterator without a bound, or a list of an option that has
            not one entry for each prompt.
        TypeError: options or prompts of another kind, or a bound that is no integer.
    """
    check_sizes(max_batch=max_batch, max_length=max_length)
    check_counts(num_samples=num_samples)
    max_batch, max_length = (None if size is None else operator.index(size) for size in (max_batch, max_length))
    prompts = token_lists(prompts, attention_mask)
    count = None if isinstance(prompts, Iterator) else len(prompts)
    what = "an iterator of them" if count is None else f"{count * num_samples}"
    if count is not None and count * num_samples > MOST_TEXTS:
        raise ValueError(f"num_samples of {num_samples} makes {what} texts; one call takes at most {MOST_TEXTS}")
    if most_prompts is not None and (count is None or count > most_prompts):
        raise ValueError(f"a stream takes one prompt, got {what}")
    if count == 0:
        raise ValueError("generate needs at least one prompt, a list of token lists, got none")
    each = [Request.of(lm, **own) for own in _options_of_each(options, count)]
    kinds = frozenset(request.sampling for request in each)
    if num_samples > 1 and any(kind.is_greedy for kind in kinds):
        raise ValueError(f"num_samples of {num_samples} needs sampling: greedy texts of one prompt are equal")
    streamer = options.get("streamer")
    num_streamers = len(streamer) if isinstance(streamer, Sequence) else 1
    if any(request.streamer is not None for request in each) and (count is None or count * num_samples > num_streamers):
        raise ValueError(f"a streamer takes one prompt, got {what}")

    def make(place: int, prompt: Any) -> Request:
        number = place // num_samples
        return each[number % len(each)].with_prompt(lm, prompt, max_length, number, place)

    repeated = (prompt for prompt in prompts for _ in range(num_samples))
    if count is None:
        if max_batch is None or max_length is None:
            raise ValueError("an iterator of prompts needs max_batch and max_length, which bound the memory")
        requests = _runnable(make, repeated)
        prompt_length, is_padded, refills = max_length, True, True
    else:
        listed = [make(place, prompt) for place, prompt in enumerate(repeated)]
        requests, lengths = iter(listed), {len(request.prompt) for request in listed}
        prompt_length, is_padded = max(lengths), len(lengths) > 1
        max_length = max_length or max(len(request.prompt) + request.max_new_tokens for request in listed)
        max_batch = min(max_batch or len(listed), len(listed))
        refills = max_batch < len(listed)
    return Batch(
        requests, kinds, max(len(request.stop_token_ids) for request in each), max_batch, max_length, prompt_length,
        is_padded, refills, tuple(request.rules for request in each if request.rules.parts),
        any(request.grammar is not None for request in each),
        RowProcessors() if any(request.processors for request in each) else processor,
        keeps_probs=any(request.return_steps for request in each),
        limits_nodes=any(request.budget is not None for request in each),
        keeps_logprobs=any(request.logprobs is not None for request in each),
    )  # fmt: skip


def _options_of_each(options: dict[str, Any], count: int | None) -> list[dict[str, Any]]:
    """List the options of each of ``count`` prompts, or those of all where none is a list; None for an iterator."""
    for name in ("stop_token_ids", "stop_strings", "allowed_token_ids", "bad_words"):
        if isinstance(options.get(name), Iterator):  # every text reads them
            options = {**options, name: [*options[name]]}
    if options.get("stop_strings") is not None and options.get("tokenizer") is not None:
        options = {**options, "tokenizer": TokenBytes(options["tokenizer"])}  # texts share what is known of it
    lists = {name: value for name, value in options.items() if _is_of_each(name, value)}
    for name, values in lists.items():
        if count is None:
            raise ValueError(f"{name} must be one for all prompts of an iterator, got a list of {len(values)}")
        if len(values) != count:
            what = f"one for all prompts or one for each of {count}"
            raise ValueError(f"{name} must be {what}, got a list of {len(values)}")
    if None in list(lists.get("sampling", ())):
        raise TypeError("sampling must be an object such as stree.Sampling() for each prompt, got None in a list")
    own = (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
    return [{**options, **values} for values in own] if lists else [options]


def _is_of_each(name: str, value: Any) -> bool:
    """Whether an option is a list of one for each prompt; a list that can be called is a processor."""
    if not isinstance(value, Sequence) or isinstance(value, str) or callable(value):
        return False
    lists = (list, tuple, set, frozenset)
    if name == "stop_token_ids":  # of one prompt they are a list, too
        return bool(value) and all(isinstance(one, lists) for one in value)
    if name == "allowed_token_ids":
        return bool(value) and all(one is None or isinstance(one, lists) for one in value)
    if name == "bad_words":  # of one prompt they are lists in a list
        words = [word for one in value if isinstance(one, lists) for word in one]
        return any(one is None for one in value) or any(isinstance(word, lists) for word in words)
    return name != "stop_strings" or any(not isinstance(one, str) for one in value)


def _runnable(make: Callable[[int, Any], Request], prompts: Iterator[Any]) -> Iterator[Request]:
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
