"""``generate``: what a user calls; the loop itself is ``session``'s."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from operator import index

import torch

from stree.budget.policy import MAX_DEPTH, MOST_FIXED, AutoBudget, BudgetPolicy, FixedBudget, TreeSizes
from stree.budget.tree_sizes import PLAIN, Choice
from stree.decode.logits_processors import EachNode, LogitsProcessor, NodeProcessor, with_processor
from stree.decode.loop import DecodeLoop, Observer, Streamer
from stree.decode.memory import arithmetic, check_memory, fits_in_memory
from stree.decode.profiling import step_times
from stree.decode.stats import Generation
from stree.decode.step_cache import StepCache, step_cache_of
from stree.decode.validation import check_arguments, check_block, check_lossy, check_nodes, slots_for, token_ids
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.drafters.target_init import TargetInitDrafter
from stree.growth import Growth
from stree.growth.target_init import TargetInit
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import LONGEST

__all__ = ["Generation", "GenerationError", "GenerationInterrupted", "Streamer", "generate", "run"]


class GenerationError(RuntimeError):
    """A drafter, the model or a streamer failed.

    Attributes:
        output: what was generated: before the failure, or, where only the drafter failed, everything, as the rest is
            then decoded without it.
    """

    def __init__(self, message: str, output: Generation) -> None:
        super().__init__(message, output)  # both, so that it can be pickled
        self.output = output

    def __str__(self) -> str:
        """Give the message."""
        return str(self.args[0])


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C; ``output`` holds what was generated before."""

    def __init__(self, output: Generation) -> None:
        super().__init__(output)
        self.output = output

    def __str__(self) -> str:
        """Say so."""
        return "generation interrupted"


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
        growth: the shape of a model drafter's trees; None for its default, ``Calibrated()``.  Where nothing is grown,
            as with ``SuffixDrafter`` or a budget of 1, it is not used, and the statistics name none.
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
        Sequences and statistics, which say under "lossless" whether the text has the target's distribution.

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


@torch.inference_mode(False)  # what is kept for the next call must be usable outside of it
@torch.no_grad()
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
    steered: Callable[[TreeSizes], BudgetPolicy] | None = None,
) -> Generation:
    """Do what ``generate`` does, with a processor of many nodes and an observer of every token.

    ``steered`` gives what decides on sizes instead of the controller.
    """
    check_arguments(lm, drafter, growth, budget, verifier, sampling, max_new_tokens, seed, streamer, cancelled)
    max_new_tokens, budget = index(max_new_tokens), budget if isinstance(budget, str) else index(budget)
    stops = token_ids("stop_token_ids", () if stop_token_ids is None else stop_token_ids)
    is_lossy = isinstance(growth, TargetInit)
    if is_lossy:
        check_lossy(drafter, verifier, allow_lossy)
    slots = slots_for(lm, prompts, max_new_tokens, max_batch, max_length, streamer)
    if budget == 1:
        drafter = NoDrafter()
    step_cache = step_cache_of(lm) if processor is None and not is_lossy else None  # else host code runs in every step
    shape = _shape(drafter, growth, sampling)
    choices = _choices(drafter, shape, budget, has_growth=growth is not None, is_captured=step_cache is not None)
    check_nodes(lm, drafter, choices.max_nodes)
    if verifier == "block":
        check_block(drafter, shape, choices.max_nodes)
    room = slots.max_batch, slots.max_length + choices.max_nodes, choices.max_nodes
    make_room = partial(_make_room, lm, drafter, step_cache, room)
    named = None if shape is None or isinstance(drafter, (NoDrafter, SuffixDrafter)) else str(shape)
    measured = None
    if len(choices.choices) > 1:
        measured = partial(
            step_times, lm, drafter, choices, slots.max_batch, sampling=sampling, verifier=verifier,
            step_cache=step_cache, processor=processor,
        )  # fmt: skip
    is_padded = step_cache is not None and bool(drafter.models)
    if processor is not None:
        lm, drafter = with_processor(lm, drafter, processor, is_greedy=sampling.is_greedy)
    if is_lossy and isinstance(drafter, ModelDrafter):
        drafter, verifier = TargetInitDrafter(drafter), LONGEST
    loop = DecodeLoop(
        lm, slots.prompts, sampling=sampling, max_new_tokens=max_new_tokens, stop_token_ids=stops,
        seed=index(seed), max_batch=slots.max_batch, max_length=slots.max_length, refills=slots.refills,
        streamer=streamer, observer=observer, step_cache=step_cache, cancelled=cancelled,
    )  # fmt: skip
    policy: BudgetPolicy = FixedBudget(shape, choices.max_nodes)
    key = None if step_cache is None else loop.key(drafter, policy, verifier, slots.max_batch)
    make_room(key)
    loop.settings = {"growth": named, "budget": budget, "verifier": verifier, "lossless": not is_lossy}
    try:
        if measured is not None:
            times = measured(loop.opening())
            policy = AutoBudget(
                choices, times, experience=times.experience, is_padded=is_padded, behind_ms=times.behind_ms
            )
            make_room(key)
        if steered is not None:
            policy = steered(choices)
        loop.run(drafter, policy, verifier)
    except KeyboardInterrupt as interrupt:
        raise GenerationInterrupted(loop.output("interrupted")) from interrupt
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if is_memory and step_cache is not None:
            step_cache.release()
        if not (loop.is_started or is_memory):
            raise
        message = f"generation failed after {loop.num_new_tokens} new tokens: {error}"
        if is_memory:
            message += f"; the target's state takes {arithmetic(lm, *room)}; lower max_batch, max_length or budget"
        raise GenerationError(message, loop.output("error")) from error
    if loop.problem is not None:
        message = f"the drafter failed, and the rest was decoded without it: {loop.problem}"
        raise GenerationError(message, loop.output("length")) from loop.problem
    return loop.output("length")


def _shape(drafter: Drafter, growth: Growth | None, sampling: Sampling) -> Growth | None:
    """Give the growth of all steps, bound to the sampling, or None where the drafter has none."""
    shape = drafter.default_growth if growth is None else growth
    return None if shape is None else shape.bind(sampling)


def _choices(
    drafter: Drafter, shape: Growth | None, budget: int | str, *, has_growth: bool, is_captured: bool
) -> TreeSizes:
    """List the sizes that steps may have: one, or what "auto" chooses from."""
    if isinstance(budget, str) and isinstance(drafter, NoDrafter):
        return TreeSizes(shape, [PLAIN])
    if isinstance(budget, str) and not isinstance(shape, TargetInit):
        has_model = bool(drafter.models)
        return TreeSizes.of(shape, None if has_growth else MAX_DEPTH, has_model=has_model, is_coarse=is_captured)
    if isinstance(budget, str):
        assert shape is not None, "it is TargetInit"
        budget = shape.plan(MOST_FIXED).num_nodes + 1
    if shape is not None:
        shape.plan(budget)  # refuses a fixed shape above the budget
    return TreeSizes(shape, [Choice(budget, 0)])


def _make_room(
    lm: TreeLM, drafter: Drafter, step_cache: StepCache | None, room: tuple[int, int, int], key: Hashable
) -> None:
    """Drop what is kept for other texts where these need its memory; refuse what cannot fit.

    A program of this kind that is kept has its memory already.
    """
    if step_cache is not None and key in step_cache:
        return
    if step_cache is not None and not fits_in_memory(lm, drafter, *room):
        step_cache.release()
    check_memory(lm, drafter, *room)
