"""Checks of the arguments of ``generate``, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from stree.checks import check_counts, check_sizes
from stree.decode.request import Batch, GenerateArguments, Request
from stree.drafters import Drafter, FusedDrafter, SuffixDrafter, check_vocabulary
from stree.growth import Growth
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import VERIFIERS

__all__ = ["batch_for", "check_block", "check_nodes", "checked", "token_ids"]

OF_EACH_PROMPT = ("sampling", "max_new_tokens", "stop_token_ids", "seed")  # one for all prompts, or a list


def batch_for(
    lm: TreeLM, prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]], arguments: GenerateArguments
) -> Batch:
    """Make a request of every prompt, and size the batch; the prompts of a list are all checked before anything runs.

    Args:
        lm: the target.
        prompts: token lists.
        arguments: checked; see ``checked``.

    Raises:
        ValueError: no prompts, more tokens than a row holds, an iterator without a bound, or a list of parameters that
            has not one entry for each prompt.
        TypeError: prompts that are none, or a bound that is no integer.
    """
    max_batch, max_length, streamer = arguments.max_batch, arguments.max_length, arguments.streamer
    check_sizes(max_batch=max_batch, max_length=max_length)
    max_batch, max_length = (None if size is None else operator.index(size) for size in (max_batch, max_length))
    if isinstance(prompts, (str, Tensor)) or not hasattr(prompts, "__iter__"):
        raise ValueError(f"generate needs at least one prompt, a list of token lists, got {type(prompts).__name__}")
    bound = min((length for length in (max_length, lm.max_length) if length is not None), default=None)
    count = None if isinstance(prompts, Iterator) else len(prompts)
    each = {name: _listed(name, getattr(arguments, name), count) for name in OF_EACH_PROMPT}
    kinds, most_stops = frozenset(each["sampling"]), max(map(len, each["stop_token_ids"]), default=0)
    make = partial(_request, lm, arguments, bound)
    if isinstance(prompts, Iterator):
        if max_batch is None or max_length is None:
            raise ValueError("an iterator of prompts needs max_batch and max_length, which bound the memory")
        if streamer is not None:
            raise ValueError("a streamer takes one prompt, got an iterator of them")
        return Batch(_each(make, prompts), kinds, most_stops, max_batch, max_length, refills=True)
    if not count:
        raise ValueError("generate needs at least one prompt, a list of token lists, got none")
    requests = [make(place, prompt) for place, prompt in enumerate(prompts)]
    if streamer is not None and count > 1:
        raise ValueError(f"a streamer takes one prompt, got {count}")
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    rows = min(max_batch or count, count)
    return Batch(iter(requests), kinds, most_stops, rows, max_length or longest, refills=rows < count)


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
    lm: TreeLM, arguments: GenerateArguments, max_length: int | None, place: int, prompt: Sequence[int]
) -> Request:
    """Check a prompt, tokens of the vocabulary and as many as leave space for the new ones; return its request."""
    values = {name: getattr(arguments, name) for name in OF_EACH_PROMPT}
    own = {name: value[place] if isinstance(value, list) else value for name, value in values.items()}
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise TypeError(f"prompt {place} must be a list of tokens, got {type(prompt).__name__}")
    if not len(prompt):
        raise ValueError(f"prompt {place} is empty; every prompt needs at least one token")
    tokens = token_ids(f"prompt {place}", prompt)
    bad = next((token for token in tokens if not 0 <= token < lm.vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt {place} has token {bad}, outside the vocabulary of {lm.vocab_size}")
    if max_length is not None and len(prompt) + own["max_new_tokens"] > max_length:
        new = own["max_new_tokens"]
        raise ValueError(f"prompt {place} of {len(prompt)} tokens plus {new} new ones exceeds max_length {max_length}")
    return Request(tokens, sequence=place, **own)


def _each(make: Callable[[int, Sequence[int]], Request], prompts: Iterator[Sequence[int]]) -> Iterator[Request]:
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


def token_ids(name: str, tokens: Iterable[int]) -> list[int]:
    """Make a list of integers of what may be a tensor, an array or numbers of numpy.

    Raises:
        TypeError: something else; the message begins with ``name``.
    """
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name} must be a list of token ids, integers, got {tokens!r:.80}") from None


def checked(lm: TreeLM, drafter: Drafter, arguments: GenerateArguments) -> GenerateArguments:
    """Refuse bad arguments before anything runs; return them with Python's own integers.

    A parameter of which each prompt has its own is a list in what is returned.

    Raises:
        TypeError: an object or a number of another kind.
        ValueError: a number out of its range, another name, models of two vocabularies or on two devices, or a model
            that was moved since it was patched.
        RuntimeError: a model in training mode, or one that would run under autocast.
        NotImplementedError: a larger tree than kernels take.
    """
    _check_kinds(lm, drafter, arguments)
    budget, verifier = arguments.budget, arguments.verifier
    if isinstance(budget, str) and budget != "auto":
        raise ValueError(f"budget must be a number of nodes or 'auto', got {budget!r}")
    check_counts(budget=1 if budget is None or budget == "auto" else budget)
    max_new_tokens, seed = (_integers(name, getattr(arguments, name)) for name in ("max_new_tokens", "seed"))
    for count in max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens]:
        check_counts(max_new_tokens=count)
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    if budget is not None and not isinstance(budget, str):
        budget = operator.index(budget)
        check_nodes(lm, drafter, budget)
    for model in drafter.models:
        check_vocabulary(model, lm.vocab_size)
        if model.device != lm.device:
            raise ValueError(f"drafter and target must be on one device, got {model.device} and {lm.device}")
    for model in (lm, *drafter.models):
        if isinstance(model, TreeLM):  # anything with its methods may be passed in its place
            model.check_ready()
    return replace(
        arguments, budget=budget, max_new_tokens=max_new_tokens, seed=seed, stop_token_ids=_stops(lm, arguments),
        sampling=arguments.sampling if isinstance(arguments.sampling, Sampling) else list(arguments.sampling),
    )  # fmt: skip


def _integers(name: str, value: int | Sequence[int]) -> int | list[int]:
    """Return Python's own integers for a number or for a list with one for each prompt."""
    try:
        return operator.index(value) if hasattr(value, "__index__") else list(map(operator.index, value))
    except TypeError:
        raise TypeError(f"{name} must be an integer or a list of them, got {value!r:.80}") from None


def _stops(lm: TreeLM, arguments: GenerateArguments) -> Any:
    """Return the set of stop tokens of all prompts, or a list of sets, one for each prompt."""
    stops = arguments.stop_token_ids
    if stops is None:  # anything with the methods of a TreeLM may be passed in its place
        return frozenset(() if arguments.ignore_eos else getattr(lm, "eos_token_ids", ()))
    if (
        isinstance(stops, (list, tuple))
        and stops
        and all(isinstance(part, (list, tuple, set, frozenset)) for part in stops)
    ):
        return [frozenset(token_ids("stop_token_ids", part)) for part in stops]
    return frozenset(token_ids("stop_token_ids", cast(Iterable[int], stops)))


def _check_kinds(lm: TreeLM, drafter: Drafter, arguments: GenerateArguments) -> None:
    """Refuse objects of another kind."""
    if not isinstance(drafter, Drafter):
        example = "an object such as stree.drafters.SuffixDrafter(), derived from stree.drafters.Drafter"
        raise TypeError(f"drafter must be {example}, got {drafter!r:.80}")
    samplings = arguments.sampling if isinstance(arguments.sampling, (list, tuple)) else [arguments.sampling]
    needed = [
        ("lm", lm, "new_state", "stree.TreeLM(model)"),
        *(("sampling", sampling, "probs", "stree.Sampling(temperature=0.8)") for sampling in samplings),
    ]
    optional = [
        ("growth", arguments.growth, "bind", "stree.growth.Chain(4)"),
        ("streamer", arguments.streamer, "put", "transformers.TextStreamer(tokenizer)"),
        ("cancelled", arguments.cancelled, "__call__", "a function of a prompt's place"),
    ]
    for name, value, method, example in (*needed, *(row for row in optional if row[1] is not None)):
        if isinstance(value, type) or not hasattr(value, method):
            raise TypeError(f"{name} must be an object such as {example}, got {value!r:.80}")


def check_block(drafter: Drafter, growth: Growth | None, budget: int) -> None:
    """Refuse block verification where trees will have branches, as far as that is known.

    Raises:
        ValueError: they will.
    """
    plan = None if growth is None or not drafter.models else growth.plan(budget)
    widths = [layer.width + layer.leaves for layer in plan.layers] if plan is not None else []
    retrieves = isinstance(drafter, (SuffixDrafter, FusedDrafter)) and budget > 2
    if retrieves or max(widths, default=1) > 1 or (plan is not None and plan.is_heap and plan.num_nodes > 1):
        what = type(drafter).__name__ if plan is None or retrieves else str(growth)
        raise ValueError(f"block verification takes trees without branches, such as Chain's; got {what}")


def check_nodes(lm: TreeLM, drafter: Drafter, nodes: int) -> None:
    """Refuse larger trees than kernels take."""
    for model in (lm, *drafter.models):
        most = most_nodes(model.device, model.dtype)
        most = None if most is None else most - (model is not lm)  # a draft model runs its last leaf beside the tree
        if most is not None and nodes > most:
            raise NotImplementedError(f"budget must be at most {most} on {model.device}, got {nodes}")
