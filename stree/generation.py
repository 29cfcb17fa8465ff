"""``generate``, which users call: checks its arguments, chooses the policy of tree sizes, runs the loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from stree.budget.controller import START, StepHistory
from stree.budget.policy import MAX_FIXED, AutoBudget, BudgetPolicy, candidate_sizes
from stree.decode.logits_processors import EachNode, LogitsProcessor, with_processor
from stree.decode.loop import DecodeLoop
from stree.decode.memory import arithmetic, check_memory, fits_in_memory
from stree.decode.request import Batch, GenerateArguments, Streamer
from stree.decode.sequences import Sequences
from stree.decode.stats import Generation
from stree.decode.step_cache import StepCache, step_cache_of
from stree.decode.validation import batch_for, check_block, check_nodes, checked
from stree.drafters import Drafter, NoDrafter, SuffixDrafter, load
from stree.drafters.target_init import drafter_and_verifier
from stree.growth import Growth, parse_growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["Generation", "GenerationError", "GenerationInterrupted", "Streamer", "generate", "run"]

MANY_NODES = 1024  # above which a budget is most likely a mistake

logger = logging.getLogger("stree")

_histories: weakref.WeakKeyDictionary[TreeLM, dict[Hashable, StepHistory]] = weakref.WeakKeyDictionary()


class GenerationError(RuntimeError):
    """The drafter, the model or a streamer failed.

    Attributes:
        output: what was generated: before the failure, or, where only the drafter failed, everything, as the rest is
            then decoded without it.
    """

    def __init__(self, message: str, output: Generation) -> None:
        super().__init__(message, output)  # both, so that it can be pickled
        self.output = output

    def __str__(self) -> str:
        return str(self.args[0])


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C; ``output`` holds what was generated before."""

    def __init__(self, output: Generation) -> None:
        super().__init__(output)
        self.output = output

    def __str__(self) -> str:
        return "generation interrupted"


def generate(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    drafter: Drafter | TreeLM | str | Path | None = None,
    *,
    growth: Growth | str | None = None,
    budget: int | str | None = None,
    verifier: str = "auto",
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop_token_ids: Iterable[int] | Sequence[Iterable[int]] | None = None,
    ignore_eos: bool = False,
    logits_processor: LogitsProcessor | None = None,
    seed: int | Sequence[int] = 0,
    streamer: Streamer | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    allow_lossy: bool = False,
    cancelled: Callable[[int], bool] | None = None,
) -> Generation:
    """Generate from a target, token for token distributed as the target alone would.

    ``sampling``, ``max_new_tokens``, ``stop_token_ids`` and ``seed`` are one for all prompts, or lists of one for each.

    Args:
        lm: the target.
        prompts: token lists of any lengths, none empty; or an iterator of them, read as slots become free.
        drafter: what proposes trees, or what ``stree.drafters.load`` makes one of; None for ``SuffixDrafter()``.
        growth: the shape of a model drafter's trees, or its name as on the command line, such as "chain:4"; None for
            its default, ``Calibrated()``.  Where nothing is grown, as with ``SuffixDrafter`` or a budget of 1, it is
            not used, and the statistics name none.
        budget: most nodes a step, root included; 1 is plain decoding.  "auto" chooses the size of every step, up to 64
            nodes, by goodput: what earlier steps emitted over the time that they took.  Greedy text and text under
            MATCH do not depend on it; sampled text of a draft model does, and so on timing and on the prompts that
            share its batch, where under a number a seed names a text.  None: 16 for one sequence with a draft model,
            else "auto".
        verifier: "auto", "match", "rejection", "traversal" or "block"; see ``stree.accept``.
        sampling: temperature, top-k, top-p, min-p; None for greedy.
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence, and are kept; None for ``lm.eos_token_ids``, the model's own.
        ignore_eos: write on through the model's own stop tokens, as benchmarks do.
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
    arguments = GenerateArguments(
        growth=parse_growth(growth) if isinstance(growth, str) else growth, budget=budget, verifier=verifier,
        sampling=Sampling() if sampling is None else sampling,
        max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, seed=seed,
        streamer=streamer, max_batch=max_batch, max_length=max_length, allow_lossy=allow_lossy, cancelled=cancelled,
        processor=None if logits_processor is None else EachNode(logits_processor),
    )  # fmt: skip
    return run(lm, prompts, SuffixDrafter() if drafter is None else load(drafter, lm), arguments)


@torch.inference_mode(False)  # what is kept for the next call must be usable outside of it
@torch.no_grad()
def run(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]] | Iterator[Sequence[int]],
    drafter: Drafter,
    arguments: GenerateArguments,
) -> Generation:
    """Do what ``generate`` does, with what only callers within the library pass."""
    arguments = checked(lm, drafter, arguments)
    drafter, verifier = drafter_and_verifier(drafter, arguments.growth, arguments.verifier, arguments.allow_lossy)
    batch = batch_for(lm, prompts, arguments)
    if not drafter.is_lossless and len(batch.kinds) > 1:
        raise ValueError(f"TargetInit takes one sampling for all prompts, got {len(batch.kinds)}")
    drafter = NoDrafter() if arguments.budget == 1 else drafter
    # With a logits processor host code runs in every step, and so it does under a lossy rule.
    step_cache = step_cache_of(lm) if arguments.processor is None and drafter.is_lossless else None
    budget, policy = _budget_policy(lm, drafter, batch, replace(arguments, verifier=verifier))
    growth, max_nodes = policy.growth, policy.max_nodes
    processed = with_processor(lm, drafter, arguments.processor, is_greedy=batch.is_greedy)
    sequences = Sequences(arguments.streamer, arguments.observer, arguments.cancelled)
    loop = DecodeLoop(processed[0], batch, sequences, verifier, step_cache)
    loop.settings = {
        "growth": str(growth) if drafter.uses_growth and growth is not None else None, "budget": budget,
        "verifier": verifier, "lossless": drafter.is_lossless,
    }  # fmt: skip
    key = None if step_cache is None else loop.key(processed[1], policy, batch.max_batch)
    extent = batch.max_batch, batch.max_length + max_nodes, max_nodes
    _reserve_memory(lm, drafter, step_cache, extent, key)
    with _failures_with_output(loop, lambda: arithmetic(lm, *extent)):
        loop.run(processed[1], policy)
    if loop.problem is not None:
        message = f"the drafter failed, and the rest was decoded without it: {loop.problem}"
        raise GenerationError(message, loop.output("length")) from loop.problem
    return loop.output("length")


def _budget_policy(
    lm: TreeLM, drafter: Drafter, batch: Batch, arguments: GenerateArguments
) -> tuple[int | str, BudgetPolicy]:
    """Return the budget, and what chooses growth and nodes of every step by it."""
    growth = drafter.default_growth if arguments.growth is None else arguments.growth
    # Which trees are planned depends on this alone; the decode step binds the growth to the parameters of each row.
    growth = None if growth is None else growth.bind(Sampling(0.0 if batch.is_greedy else 1.0))
    budget = _default_budget(drafter, growth, batch.max_batch) if arguments.budget is None else arguments.budget
    sizes = _tree_sizes(drafter, growth, budget)
    check_nodes(lm, drafter, sizes[-1])
    if sizes[-1] > MANY_NODES:
        logger.warning("a step of %d nodes costs more than it emits; 16 to 64 are usual", sizes[-1])
    if arguments.verifier == "block":
        check_block(drafter, growth, sizes[-1])
    if arguments.policy is not None:
        return budget, arguments.policy(growth, sizes)
    if len(sizes) == 1:
        return budget, BudgetPolicy(growth, sizes[0])
    history = _step_history(lm, drafter, growth, batch, arguments.verifier)
    # The rows of a batch share a step's cost less than its nodes do: draft calls must first show that they pay.
    start = START if batch.max_batch == 1 else 1 if drafter.models else START // 2
    return budget, AutoBudget(growth, sizes, history, start)


def _default_budget(drafter: Drafter, growth: Growth | None, batch: int) -> int | str:
    """Return the budget where the caller names none: START nodes for one sequence with a model, or a fixed shape."""
    if batch > 1 or not drafter.models or not drafter.is_lossless:
        return "auto"
    sizes = candidate_sizes(growth)
    return START if START in sizes else sizes[-1]


def _tree_sizes(drafter: Drafter, growth: Growth | None, budget: int | str) -> list[int]:
    """List the sizes that steps may have: one, or what "auto" chooses from."""
    if isinstance(budget, str):
        if isinstance(drafter, NoDrafter):
            return [1]
        if drafter.is_lossless:
            return candidate_sizes(growth)
        assert growth is not None, "a lossy rule has a growth"
        budget = growth.plan(MAX_FIXED).num_nodes + 1
    if growth is not None:
        growth.plan(budget)  # refuses a fixed shape above the budget
    return [budget]


def _step_history(lm: TreeLM, drafter: Drafter, growth: Growth | None, batch: Batch, verifier: str) -> StepHistory:
    """Return what earlier generations of the same kind of steps have shown."""
    histories = _histories.setdefault(lm, {})
    key = (
        type(drafter), tuple(map(weakref.ref, drafter.models)), repr(growth), batch.kinds, batch.max_batch, verifier,
        torch.get_num_threads(),
    )  # fmt: skip
    return histories.setdefault(key, StepHistory())


def _reserve_memory(
    lm: TreeLM, drafter: Drafter, step_cache: StepCache | None, extent: tuple[int, int, int], key: Hashable
) -> None:
    """Drop what is kept for other texts where these need its memory; refuse what cannot fit.

    A decode step with this key that is kept has its memory already.
    """
    if step_cache is not None and key in step_cache:
        return
    if step_cache is not None and not fits_in_memory(lm, drafter, *extent):
        step_cache.release()
    check_memory(lm, drafter, *extent)


@contextmanager
def _failures_with_output(loop: DecodeLoop, state_size: Callable[[], str]) -> Iterator[None]:
    """Raise what ends a generation together with the text that it has; before the first token, as it is."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise GenerationInterrupted(loop.output("interrupted")) from interrupt
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError)
        if is_memory and loop.step_cache is not None:
            loop.step_cache.release()
        if not (loop.is_started or is_memory):
            raise
        message = f"generation failed after {loop.sequences.num_new_tokens} new tokens: {error}"
        if is_memory:
            message += f"; the target's state takes {state_size()}; lower max_batch, max_length or budget"
        raise GenerationError(message, loop.output("error")) from error
