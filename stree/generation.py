"""``generate``: what a user calls; the loop itself is ``session``'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stree.drafters import Drafter, HasModel, ModelDrafter, NoDrafter, SuffixDrafter
from stree.drafters.initialised import InitialisedDrafter
from stree.engine import Engine, engine_of
from stree.growth import Growth
from stree.growth.target_init import TargetInit
from stree.kernels.topology import most_nodes
from stree.models.tree_lm import TreeLM
from stree.processing import EachNode, LogitsProcessor, NodeProcessor, with_processor
from stree.rehearsal import step_times
from stree.room import arithmetic, check_room, has_room
from stree.sampling import Sampling
from stree.session import Observer, Session, Streamer
from stree.sizes import PLAIN, Choice
from stree.statistics import Generation
from stree.steering import MAX_DEPTH, MOST_FIXED, AutoSize, FixedSize, Sizes, Steering
from stree.verify import LONGEST, VERIFIERS

__all__ = ["Generation", "GenerationError", "GenerationInterrupted", "Streamer", "generate", "run"]


class GenerationError(RuntimeError):
    """A drafter, the model or a streamer failed.

    Attributes:
        output: what was generated: before the failure, or, where only the drafter failed, everything, as the rest is
            then decoded without it.
    """

    def __init__(self, message: str, output: Generation) -> None:
        super().__init__(message)
        self.output = output


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C; ``output`` holds what was generated before."""

    def __init__(self, output: Generation) -> None:
        super().__init__("generation interrupted")
        self.output = output


def generate(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    drafter: Drafter | None = None,
    growth: Growth | None = None,
    budget: int | str = "auto",
    verifier: str = "auto",
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop_token_ids: Iterable[int] | None = None,
    logits_processor: LogitsProcessor | None = None,
    seed: int = 0,
    streamer: Streamer | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    allow_lossy: bool = False,
    cancelled: Callable[[int], bool] | None = None,
) -> Generation:
    """Generate from a target, token for token distributed as the target alone would.

    Args:
        lm: the target.
        prompts: token lists of any lengths, none empty; or an iterator of them, read as slots become free.
        drafter: what proposes trees; None for ``SuffixDrafter()``.
        growth: the shape of a model drafter's trees; None for its default, ``Calibrated()``.
        budget: most nodes a step, root included; 1 is plain decoding; "auto" for the size of the best goodput, up to 64
            nodes, chosen anew for every step.  What steps take, and what a draft model's trees bring behind pieces of
            the first prompt, is measured before the first text of a kind, which its statistics leave out, and kept
            with ``lm``: within a process a seed names a text.  A batch shares one size a step, so with a temperature
            and a draft model, MATCH apart, a text depends under "auto" on the prompts that share its batch, and on the
            process; under a fixed budget it does not.
        verifier: "auto", "match", "rejection", "traversal" or "block"; see ``stree.accept``.
        sampling: temperature, top-k, top-p; None for greedy.
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence.
        logits_processor: a function of int64[1, length] text and float[1, vocab] logits that returns logits, as
            transformers' processors are; called for every node that the target may reach, with the text that ends
            there, and for the draft model's likewise.  It must depend on nothing but its arguments.
        seed: of the random numbers.
        streamer: receives tokens as they are emitted; one prompt only.
        max_batch: most sequences at once; the next prompt takes the place of one that has finished.  None for all
            prompts of a list together.  Under a fixed budget no text depends on it.
        max_length: most tokens of a prompt and its new ones; None for what the longest prompt of a list needs.  Memory
            is bounded by ``max_batch`` times it.  An iterator needs both.
        allow_lossy: let ``TargetInit`` run, whose text is not distributed as the target's.
        cancelled: asked after every step, by each running prompt's place in ``prompts``, whether that one shall end;
            the others go on, under a fixed budget unchanged.

    Returns:
        Sequences and statistics, which say under "lossless" whether the text has the target's law.

    Raises:
        ValueError: an argument outside its range, which the message names, or states that memory cannot hold.
        GenerationError: something failed in the loop; it carries what was generated before.
        GenerationInterrupted: Ctrl-C; likewise.
    """
    processor = None if logits_processor is None else EachNode(logits_processor)
    return run(
        lm, prompts, SuffixDrafter() if drafter is None else drafter, growth=growth, budget=budget, verifier=verifier,
        sampling=Sampling() if sampling is None else sampling, max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids, processor=processor, seed=seed, streamer=streamer, max_batch=max_batch,
        max_length=max_length, allow_lossy=allow_lossy, cancelled=cancelled,
    )  # fmt: skip


def run(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    drafter: Drafter,
    *,
    growth: Growth | None,
    budget: int | str,
    verifier: str,
    sampling: Sampling,
    max_new_tokens: int,
    stop_token_ids: Iterable[int] | None,
    processor: NodeProcessor | None,
    seed: int,
    streamer: Streamer | None,
    observer: Observer | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    allow_lossy: bool = False,
    cancelled: Callable[[int], bool] | None = None,
    steered: Callable[[Sizes], Steering] | None = None,
) -> Generation:
    """Do what ``generate`` does, with a processor of many nodes and an observer of every token.

    ``steered`` gives what decides on sizes instead of the controller.
    """
    _check(lm, drafter, budget, verifier, max_new_tokens)
    is_lossy = isinstance(growth, TargetInit)
    if is_lossy:
        _check_lossy(drafter, verifier, allow_lossy)
    slots = _slots(lm, prompts, max_new_tokens, max_batch, max_length, streamer)
    if budget == 1:
        drafter = NoDrafter()
    engine = engine_of(lm) if processor is None and not is_lossy else None  # else host code runs in every step
    shape = _shape(drafter, growth, sampling)
    choices = _choices(drafter, shape, budget, has_growth=growth is not None, is_captured=engine is not None)
    _check_nodes(lm, drafter, choices.max_nodes)
    room = slots.max_batch, slots.max_length + choices.max_nodes, choices.max_nodes
    _make_room(lm, drafter, engine, room)
    measured = None
    if len(choices.choices) > 1:
        measured = partial(
            step_times, lm, drafter, choices, slots.max_batch, sampling=sampling, verifier=verifier, engine=engine,
            processor=processor,
        )  # fmt: skip
    is_padded = engine is not None and isinstance(drafter, HasModel) and bool(drafter.models)
    if processor is not None:
        lm, drafter = with_processor(lm, drafter, processor)
    if is_lossy and isinstance(drafter, ModelDrafter):
        drafter, verifier = InitialisedDrafter(drafter), LONGEST
    session = Session(
        lm, slots.prompts, sampling=sampling, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, seed=seed,
        max_batch=slots.max_batch, max_length=slots.max_length, refills=slots.refills, streamer=streamer,
        observer=observer, engine=engine, cancelled=cancelled,
    )  # fmt: skip
    named = None if shape is None else str(shape)
    session.settings = {"growth": named, "budget": budget, "verifier": verifier, "lossless": not is_lossy}
    try:
        steering: Steering = FixedSize(shape, choices.max_nodes)
        if measured is not None:
            times = measured(session.opening())
            steering = AutoSize(
                choices, times, experience=times.experience, is_padded=is_padded, behind_ms=times.behind_ms
            )
            _make_room(lm, drafter, engine, room)
        if steered is not None:
            steering = steered(choices)
        session.run(drafter, steering, verifier)
    except KeyboardInterrupt as interrupt:
        raise GenerationInterrupted(session.output("interrupted")) from interrupt
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if is_memory and engine is not None:
            engine.release()
        if not (session.is_started or is_memory):
            raise
        message = f"generation failed after {session.num_new_tokens} new tokens: {error}"
        if is_memory:
            message += f"; the target's state takes {arithmetic(lm, *room)}; lower max_batch, max_length or budget"
        raise GenerationError(message, session.output("error")) from error
    if session.problem is not None:
        message = f"the drafter failed, and the rest was decoded without it: {session.problem}"
        raise GenerationError(message, session.output("length")) from session.problem
    return session.output("length")


def _shape(drafter: Drafter, growth: Growth | None, sampling: Sampling) -> Growth | None:
    """Give the growth of all steps, bound to the sampling, or None where the drafter has none."""
    default: Growth | None = getattr(drafter, "default_growth", None)
    shape = default if growth is None else growth
    return None if shape is None else shape.bind(sampling)


def _choices(
    drafter: Drafter, shape: Growth | None, budget: int | str, *, has_growth: bool, is_captured: bool
) -> Sizes:
    """List the sizes that steps may have: one, or what "auto" chooses from."""
    if isinstance(budget, str) and isinstance(drafter, NoDrafter):
        return Sizes(shape, [PLAIN])
    if isinstance(budget, str) and not isinstance(shape, TargetInit):
        has_model = isinstance(drafter, HasModel) and bool(drafter.models)
        return Sizes.of(shape, None if has_growth else MAX_DEPTH, has_model=has_model, is_coarse=is_captured)
    if isinstance(budget, str):
        assert shape is not None, "it is TargetInit"
        budget = shape.plan(MOST_FIXED).num_nodes + 1
    if shape is not None:
        shape.plan(budget)  # refuses a fixed shape above the budget
    return Sizes(shape, [Choice(budget, 0)])


def _make_room(lm: TreeLM, drafter: Drafter, engine: Engine | None, room: tuple[int, int, int]) -> None:
    """Drop what is kept for other texts where these need its memory; refuse what cannot fit."""
    if engine is not None and not has_room(lm, drafter, *room):
        engine.release()
    check_room(lm, drafter, *room)


def _check_lossy(drafter: Drafter, verifier: str, allow_lossy: bool) -> None:
    """Refuse ``TargetInit`` where it is not allowed, or where it cannot run."""
    if not allow_lossy:
        raise ValueError("TargetInit does not keep the target's law; it runs only with allow_lossy=True")
    if not isinstance(drafter, ModelDrafter):
        raise ValueError(f"TargetInit needs a ModelDrafter, got {type(drafter).__name__}")
    if verifier != "auto":
        raise ValueError(f"TargetInit has a verifier of its own; leave verifier at 'auto', got {verifier!r}")


@dataclass(frozen=True, slots=True)
class _Slots:
    """Prompts, each with what is wrong with it or None, and the room there is for them."""

    prompts: Iterator[tuple[list[int], str | None]]
    max_batch: int
    max_length: int
    refills: bool


def _slots(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    max_new_tokens: int,
    max_batch: int | None,
    max_length: int | None,
    streamer: Streamer | None,
) -> _Slots:
    """Make room for the prompts; those of a list are all looked at before anything runs.

    Raises:
        ValueError: no prompts, no room for one, or an iterator without a bound.
        TypeError: prompts that are none.
    """
    for name, size in (("max_batch", max_batch), ("max_length", max_length)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if isinstance(prompts, (str, Tensor)):
        raise ValueError(f"generate needs at least one prompt, a list of token lists, got {type(prompts).__name__}")
    bound = min((length for length in (max_length, lm.max_length) if length is not None), default=None)

    if isinstance(prompts, Iterator):
        if max_batch is None or max_length is None:
            raise ValueError("an iterator of prompts needs max_batch and max_length, which bound the memory")
        return _Slots(_each(lm, prompts, max_new_tokens, bound), max_batch, max_length, refills=True)
    known = [_checked(lm, row, prompt, max_new_tokens, bound) for row, prompt in enumerate(prompts)]
    if not known:
        raise ValueError("generate needs at least one prompt, a list of token lists, got none")
    if streamer is not None and len(known) > 1:
        raise ValueError(f"a streamer takes one prompt, got {len(known)}")
    longest = max(map(len, known)) + max_new_tokens
    batch = min(max_batch or len(known), len(known))
    return _Slots(((prompt, None) for prompt in known), batch, max_length or longest, refills=batch < len(known))


def _each(
    lm: TreeLM, prompts: Iterator[Sequence[int]], max_new_tokens: int, max_length: int | None
) -> Iterator[tuple[list[int], str | None]]:
    """Look at prompts as they come: one that cannot be run must not end the others."""
    for row, prompt in enumerate(prompts):
        try:
            yield _checked(lm, row, prompt, max_new_tokens, max_length), None
        except (TypeError, ValueError) as problem:
            yield list(prompt) if hasattr(prompt, "__len__") else [], f"refused: {problem}"


def _checked(lm: TreeLM, row: int, prompt: Sequence[int], max_new_tokens: int, max_length: int | None) -> list[int]:
    """Look at a prompt: a list of tokens of the vocabulary that leaves room for the new ones."""
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise TypeError(f"prompt {row} must be a list of tokens, got {type(prompt).__name__}")
    if not len(prompt):
        raise ValueError(f"prompt {row} is empty; every prompt needs at least one token")
    bad = next((token for token in prompt if not 0 <= token < lm.vocab_size), None)
    if bad is not None:
        raise ValueError(f"prompt {row} has token {bad}, outside the vocabulary of {lm.vocab_size}")
    if max_length is not None and len(prompt) + max_new_tokens > max_length:
        raise ValueError(
            f"prompt {row} of {len(prompt)} tokens plus {max_new_tokens} new ones exceeds max_length {max_length}"
        )
    return list(prompt)


def _check(lm: TreeLM, drafter: Drafter, budget: int | str, verifier: str, max_new_tokens: int) -> None:
    """Refuse bad arguments before anything runs."""
    if isinstance(budget, str) and budget != "auto":
        raise ValueError(f"budget must be a number of nodes or 'auto', got {budget!r}")
    for name, value in (("budget", budget), ("max_new_tokens", max_new_tokens)):
        if not isinstance(value, (int, str)):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        if not isinstance(value, str) and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    models = drafter.models if isinstance(drafter, HasModel) else ()
    if isinstance(budget, int):
        _check_nodes(lm, drafter, budget)
    for model in models:
        if model.device != lm.device:
            raise ValueError(f"drafter and target must be on one device, got {model.device} and {lm.device}")


def _check_nodes(lm: TreeLM, drafter: Drafter, nodes: int) -> None:
    """Refuse larger trees than kernels take."""
    for model in (lm, *(drafter.models if isinstance(drafter, HasModel) else ())):
        most = most_nodes(model.device, model.dtype)
        most = None if most is None else most - (model is not lm)  # a draft model runs its last leaf beside the tree
        if most is not None and nodes > most:
            raise NotImplementedError(f"budget must be at most {most} on {model.device}, got {nodes}")
