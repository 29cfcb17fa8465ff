"""What a caller hands to ``generate``, looked at before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from stree.checks import check_counts, check_sizes
from stree.decode.loop import Streamer
from stree.drafters import Drafter, FusedDrafter, ModelDrafter, SuffixDrafter, check_vocabulary
from stree.growth import Growth
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import VERIFIERS

__all__ = ["Slots", "check_arguments", "check_block", "check_lossy", "check_nodes", "slots_for", "token_ids"]


def check_lossy(drafter: Drafter, verifier: str, allow_lossy: bool) -> None:
    """Refuse ``TargetInit`` where it is not allowed, or where it cannot run."""
    if not allow_lossy:
        raise ValueError("TargetInit does not keep the target's distribution; it runs only with allow_lossy=True")
    if not isinstance(drafter, ModelDrafter):
        raise ValueError(f"TargetInit needs a ModelDrafter, got {type(drafter).__name__}")
    if verifier != "auto":
        raise ValueError(f"TargetInit has a verifier of its own; leave verifier at 'auto', got {verifier!r}")


@dataclass(frozen=True, slots=True)
class Slots:
    """Prompts and the room there is for them.

    Attributes:
        prompts: tokens, and what is wrong with them or None.
        max_batch: most sequences at once.
        max_length: most tokens of a prompt and its new ones.
        refills: whether a prompt takes the place of one that has finished.
    """

    prompts: Iterator[tuple[list[int], str | None]]
    max_batch: int
    max_length: int
    refills: bool


def slots_for(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    max_new_tokens: int,
    max_batch: int | None,
    max_length: int | None,
    streamer: Streamer | None,
) -> Slots:
    """Make room for the prompts; those of a list are all looked at before anything runs.

    Raises:
        ValueError: no prompts, no room for one, or an iterator without a bound.
        TypeError: prompts that are none, or a bound that is no integer.
    """
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
    """Look at prompts as they come: one that cannot be run must not end the others; none that is no tokens is kept."""
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
    """Look at a prompt: a list of tokens of the vocabulary that leaves room for the new ones."""
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


def check_arguments(
    lm: TreeLM, drafter: Drafter, growth: Growth | None, budget: int | str, verifier: str, sampling: Sampling,
    max_new_tokens: int, seed: int, streamer: Streamer | None, cancelled: Callable[[int], bool] | None,
) -> None:  # fmt: skip
    """Refuse bad arguments before anything runs; they are those of ``generate``.

    Raises:
        TypeError: an object or a number of another kind.
        ValueError: a number out of its range, another name, models of two vocabularies or on two devices, or a model
            that was moved since it was patched.
        RuntimeError: a model in training mode, or one that would run under autocast.
        NotImplementedError: a larger tree than kernels take.
    """
    if not isinstance(drafter, Drafter):
        example = "an object such as stree.drafters.SuffixDrafter(), derived from stree.drafters.Drafter"
        raise TypeError(f"drafter must be {example}, got {drafter!r:.80}")
    needed = [
        ("lm", lm, "new_state", "stree.TreeLM(model)"),
        ("sampling", sampling, "probs", "stree.Sampling(temperature=0.8)"),
    ]
    optional = [
        ("growth", growth, "bind", "stree.growth.Chain(4)"),
        ("streamer", streamer, "put", "transformers.TextStreamer(tokenizer)"),
        ("cancelled", cancelled, "__call__", "a function of a prompt's place"),
    ]
    for name, value, method, example in (*needed, *(row for row in optional if row[1] is not None)):
        if isinstance(value, type) or not hasattr(value, method):
            raise TypeError(f"{name} must be an object such as {example}, got {value!r:.80}")
    if isinstance(budget, str) and budget != "auto":
        raise ValueError(f"budget must be a number of nodes or 'auto', got {budget!r}")
    check_counts(budget=1 if isinstance(budget, str) else budget, max_new_tokens=max_new_tokens)
    if not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, got {type(seed).__name__}")
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    models = drafter.models
    if not isinstance(budget, str):
        check_nodes(lm, drafter, budget)
    for model in models:
        check_vocabulary(model, lm.vocab_size)
        if model.device != lm.device:
            raise ValueError(f"drafter and target must be on one device, got {model.device} and {lm.device}")
    for model in (lm, *models):
        if isinstance(model, TreeLM):  # anything with its methods may stand in for one
            model.check_ready()


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
