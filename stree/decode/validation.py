"""Checks of the arguments of ``generate``, before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from stree.checks import check_counts, check_sizes
from stree.decode.request import Request, Slots
from stree.drafters import Drafter, FusedDrafter, SuffixDrafter, check_vocabulary
from stree.growth import Growth
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.verify import VERIFIERS

__all__ = ["check_block", "check_nodes", "checked", "slots_for", "token_ids"]


def slots_for(lm: TreeLM, prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]], request: Request) -> Slots:
    """Size the batch for the prompts; those of a list are all checked before anything runs.

    Raises:
        ValueError: no prompts, more tokens than a slot holds, or an iterator without a bound.
        TypeError: prompts that are none, or a bound that is no integer.
    """
    max_batch, max_length, streamer = request.max_batch, request.max_length, request.streamer
    max_new_tokens = request.max_new_tokens
    check_sizes(max_batch=max_batch, max_length=max_length)
    max_batch, max_length = (None if size is None else operator.index(size) for size in (max_batch, max_length))
    if isinstance(prompts, (str, Tensor)) or not hasattr(prompts, "__iter__"):
        raise ValueError(f"generate needs at least one prompt, a list of token lists, got {type(prompts).__name__}")
    bound = min((length for length in (max_length, lm.max_length) if length is not None), default=None)

    if isinstance(prompts, Iterator):
        if max_batch is None or max_length is None:
            raise ValueError("an iterator of prompts needs max_batch and max_length, which bound the memory")
        if streamer is not None:
            raise ValueError("a streamer takes one prompt, got an iterator of them")
        return Slots(_each(lm, prompts, max_new_tokens, bound), max_batch, max_length, refills=True)
    known = [_checked(lm, row, prompt, max_new_tokens, bound) for row, prompt in enumerate(prompts)]
    if not known:
        raise ValueError("generate needs at least one prompt, a list of token lists, got none")
    if streamer is not None and len(known) > 1:
        raise ValueError(f"a streamer takes one prompt, got {len(known)}")
    longest = max(map(len, known)) + max_new_tokens
    batch = min(max_batch or len(known), len(known))
    return Slots(((prompt, None) for prompt in known), batch, max_length or longest, refills=batch < len(known))


def _each(
    lm: TreeLM, prompts: Iterator[Sequence[int]], max_new_tokens: int, max_length: int | None
) -> Iterator[tuple[list[int], str | None]]:
    """Check prompts as they come: one that cannot be run must not end the others."""
    for row, prompt in enumerate(prompts):
        try:
            yield _checked(lm, row, prompt, max_new_tokens, max_length), None
        except (TypeError, ValueError) as problem:
            try:
                tokens = token_ids(f"prompt {row}", prompt)
            except TypeError:
                tokens = []
            yield tokens, f"refused: {problem}"


def _checked(lm: TreeLM, row: int, prompt: Sequence[int], max_new_tokens: int, max_length: int | None) -> list[int]:
    """Check a prompt: tokens of the vocabulary, as many as leave space for the new ones."""
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise TypeError(f"prompt {row} must be a list of tokens, got {type(prompt).__name__}")
    if not len(prompt):
        raise ValueError(f"prompt {row} is empty; every prompt needs at least one token")
    tokens = token_ids(f"prompt {row}", prompt)
    bad = next((token for token in tokens if not 0 <= token < lm.vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt {row} has token {bad}, outside the vocabulary of {lm.vocab_size}")
    if max_length is not None and len(prompt) + max_new_tokens > max_length:
        raise ValueError(
            f"prompt {row} of {len(prompt)} tokens plus {max_new_tokens} new ones exceeds max_length {max_length}"
        )
    return tokens


def token_ids(name: str, tokens: Iterable[int]) -> list[int]:
    """Make a list of integers of what may be a tensor, an array or numbers of numpy.

    Raises:
        TypeError: something else; the message begins with ``name``.
    """
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name} must be a list of token ids, integers, got {tokens!r:.80}") from None


def checked(lm: TreeLM, drafter: Drafter, request: Request) -> Request:
    """Refuse bad arguments before anything runs; return the request with Python's own integers.

    Raises:
        TypeError: an object or a number of another kind.
        ValueError: a number out of its range, another name, models of two vocabularies or on two devices, or a model
            that was moved since it was patched.
        RuntimeError: a model in training mode, or one that would run under autocast.
        NotImplementedError: a larger tree than kernels take.
    """
    _check_kinds(lm, drafter, request)
    budget, verifier = request.budget, request.verifier
    if isinstance(budget, str) and budget != "auto":
        raise ValueError(f"budget must be a number of nodes or 'auto', got {budget!r}")
    check_counts(budget=1 if budget is None or budget == "auto" else budget, max_new_tokens=request.max_new_tokens)
    if not hasattr(request.seed, "__index__"):
        raise TypeError(f"seed must be an integer, got {type(request.seed).__name__}")
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
    stops = token_ids("stop_token_ids", () if request.stop_token_ids is None else request.stop_token_ids)
    return replace(
        request, budget=budget, max_new_tokens=operator.index(request.max_new_tokens),
        seed=operator.index(request.seed), stop_token_ids=stops,
    )  # fmt: skip


def _check_kinds(lm: TreeLM, drafter: Drafter, request: Request) -> None:
    """Refuse objects of another kind."""
    if not isinstance(drafter, Drafter):
        example = "an object such as stree.drafters.SuffixDrafter(), derived from stree.drafters.Drafter"
        raise TypeError(f"drafter must be {example}, got {drafter!r:.80}")
    needed = [
        ("lm", lm, "new_state", "stree.TreeLM(model)"),
        ("sampling", request.sampling, "probs", "stree.Sampling(temperature=0.8)"),
    ]
    optional = [
        ("growth", request.growth, "bind", "stree.growth.Chain(4)"),
        ("streamer", request.streamer, "put", "transformers.TextStreamer(tokenizer)"),
        ("cancelled", request.cancelled, "__call__", "a function of a prompt's place"),
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
