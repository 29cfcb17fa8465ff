"""Checks of the arguments of ``generate``, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from stree.checks import check_counts
from stree.decode.logits_processors import LogitsProcessor, RepetitionPenalty
from stree.decode.prompts import token_ids
from stree.decode.request import GenerateArguments
from stree.decode.stop_strings import StopStrings, TokenBytes
from stree.drafters import Drafter, FusedDrafter, SuffixDrafter, check_vocabulary
from stree.growth import Growth
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import VERIFIERS

__all__ = ["check_block", "check_nodes", "checked"]


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
    check_counts(num_samples=arguments.num_samples)
    for count in max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens]:
        check_counts(max_new_tokens=count)
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    if budget is not None and not isinstance(budget, str):
        budget = operator.index(budget)
        check_nodes(lm, drafter, budget)
    if arguments.overlap and (arguments.logits_processor is not None or arguments.repetition_penalty != 1):
        raise ValueError(
            "overlap takes no logits_processor or repetition_penalty, whose host code is not run in threads"
        )
    for model in drafter.models:
        check_vocabulary(model, lm.vocab_size)
        if model.device != lm.device:
            raise ValueError(f"drafter and target must be on one device, got {model.device} and {lm.device}")
    for model in (lm, *drafter.models):
        if isinstance(model, TreeLM):  # anything with its methods may be passed in its place
            model.check_ready()
    sampling = Sampling() if arguments.sampling is None else arguments.sampling
    return replace(
        arguments, budget=budget, max_new_tokens=max_new_tokens, seed=seed, stop_token_ids=_stops(lm, arguments),
        sampling=sampling if isinstance(sampling, Sampling) else list(sampling),
        stop_strings=_stop_strings(arguments), logprobs=_top_logprobs(lm, arguments.logprobs),
        repetition_penalty=_of_each(_penalty, arguments.repetition_penalty),
        logits_processor=_of_each(_processor, arguments.logits_processor),
        num_samples=operator.index(arguments.num_samples),
    )  # fmt: skip


def _integers(name: str, value: Any) -> int | list[int]:
    """Return Python's own integers for a number or for a list with one for each prompt."""
    try:
        return operator.index(value) if hasattr(value, "__index__") else list(map(operator.index, value))
    except TypeError:
        raise TypeError(f"{name} must be an integer or a list of them, got {value!r:.80}") from None


def _of_each(make: Callable[[Any], Any], value: Any) -> Any:
    """Make something of a value, or of each one of a list; a list that can be called is a value."""
    return [*map(make, value)] if isinstance(value, (list, tuple)) and not callable(value) else make(value)


def _penalty(value: Any) -> RepetitionPenalty | None:
    """Return the processor of a penalty, or None for 1, which changes nothing."""
    penalty = RepetitionPenalty(value)
    return None if penalty.penalty == 1 else penalty


def _processor(value: Any) -> LogitsProcessor | None:
    """Refuse what is no function."""
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise TypeError(f"logits_processor must be a function of text and logits, got {value!r:.80}")
    processor: LogitsProcessor | None = value
    return processor


def _stop_strings(arguments: GenerateArguments) -> Any:
    """Return the stop strings of all prompts, or a list of those of each; they share what is known of the tokenizer."""
    stops = arguments.stop_strings
    if stops is None or isinstance(stops, StopStrings):
        return stops
    stops = [*stops] if _is_list(stops) else [stops]
    if stops and all(one is None or isinstance(one, StopStrings) for one in stops):
        return stops
    is_listed = any(one is None or _is_list(one) for one in stops)
    if not (is_listed or stops):
        return None
    if arguments.tokenizer is None:
        raise ValueError("stop_strings need the model's tokenizer: tokenizer=")
    token_bytes = TokenBytes(arguments.tokenizer)
    if not is_listed:
        return StopStrings(token_bytes, stops)
    each = [one if one is None or _is_list(one) else [one] for one in stops]
    return [StopStrings(token_bytes, one) if one else None for one in each]


def _is_list(value: Any) -> bool:
    """Whether a value holds others, and is no string."""
    return hasattr(value, "__iter__") and not isinstance(value, str)


def _top_logprobs(lm: TreeLM, logprobs: Any) -> int | None:
    """Return how many alternatives are kept beside each token's own log probability, or None for no probabilities."""
    if logprobs is None or isinstance(logprobs, bool):
        return 0 if logprobs else None
    if not hasattr(logprobs, "__index__") or not 0 <= logprobs <= lm.vocab_size:
        raise ValueError(f"logprobs must be True or a number of alternatives up to {lm.vocab_size}, got {logprobs!r}")
    return operator.index(logprobs)


def _stops(lm: TreeLM, arguments: GenerateArguments) -> Any:
    """Return the set of stop tokens of all prompts, or a list of sets, one for each prompt.

    As in transformers, one that no vocabulary has, such as -1, ends no text.
    """

    def known(tokens: Iterable[int]) -> frozenset[int]:
        return frozenset(token for token in token_ids("stop_token_ids", tokens) if 0 <= token < lm.vocab_size)

    stops = arguments.stop_token_ids
    if stops is None:  # anything with the methods of a TreeLM may be passed in its place
        return frozenset(() if arguments.ignore_eos else getattr(lm, "eos_token_ids", ()))
    if (
        isinstance(stops, (list, tuple))
        and stops
        and all(isinstance(part, (list, tuple, set, frozenset)) for part in stops)
    ):
        return [known(part) for part in stops]
    return known(cast(Iterable[int], stops))


def _check_kinds(lm: TreeLM, drafter: Drafter, arguments: GenerateArguments) -> None:
    """Refuse objects of another kind."""
    if not isinstance(drafter, Drafter):
        example = "an object such as stree.drafters.SuffixDrafter(), derived from stree.drafters.Drafter"
        raise TypeError(f"drafter must be {example}, got {drafter!r:.80}")
    samplings = arguments.sampling if isinstance(arguments.sampling, (list, tuple)) else [arguments.sampling]
    streamers = arguments.streamer if isinstance(arguments.streamer, list) else [arguments.streamer]
    needed = [
        ("lm", lm, "new_state", "stree.TreeLM(model)"),
        *(
            ("sampling", sampling, "probs", "stree.Sampling(temperature=0.8)")
            for sampling in samplings
            if sampling is not None
        ),
    ]
    optional = [
        ("growth", arguments.growth, "bind", "stree.growth.Chain(4)"),
        *(("streamer", streamer, "put", "transformers.TextStreamer(tokenizer)") for streamer in streamers),
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
