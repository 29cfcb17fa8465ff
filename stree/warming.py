"""Compiling and capturing steps before the first text, which would otherwise be slowed down by it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from stree.budget.controller import START
from stree.budget.policy import BudgetPolicy, EverySize
from stree.decode.cuda_graphs import WARM_UP
from stree.decode.request import GenerateArguments
from stree.decode.step_cache import step_cache_of
from stree.drafters import Drafter, SuffixDrafter, load
from stree.generation import GenerationError, run
from stree.growth import Growth, parse_growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["ALL_BATCHES", "compile_steps", "warm_up"]

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
ALL_BATCHES = (GREEDY,), (SAMPLED,), (GREEDY, GREEDY), (GREEDY, SAMPLED)  # a greedy batch runs other code
SHORT_PROMPT, FEW_TOKENS = (1, 1, 1, 1), 4  # a text that has a step, and repeats itself
STEPS = 2 * WARM_UP + 2  # memory that a first text allocates on the way drops its graphs


def warm_up(
    lm: TreeLM,
    drafter: Drafter | None = None,
    *,
    growth: Growth | None = None,
    max_length: int,
    budgets: Sequence[int | str] = ("auto",),
    batch_sizes: Sequence[int] = (1,),
    sampling: Sampling | None = None,
    verifier: str = "auto",
    stop_token_ids: Iterable[int] | None = None,
    ignore_eos: bool = False,
    prompt: Sequence[int] = (1,),
    shows_progress: bool = True,
) -> list[dict[str, Any]]:
    """Capture the steps of every batch size and budget, so that ``generate`` with the same arguments finds them.

    Args:
        lm: the target.
        drafter: the very object that will draft.
        growth: as for ``generate``.
        max_length: as for ``generate``, which needs the same one.
        budgets: nodes a step, of which ``generate`` must name one; "auto" for all sizes that it chooses from.
        batch_sizes: sequences at once.
        sampling: as for ``generate``.
        verifier: as for ``generate``.
        stop_token_ids: as for ``generate``.
        ignore_eos: likewise.
        prompt: similar to those to come; "auto" profiles steps on texts that continue it.
        shows_progress: whether to show a bar.

    Returns:
        An entry for each decode step that is kept: batch, length and bytes, graphs, what could not be captured and why.

    Raises:
        ValueError: no room for a few steps, or steps of this model are not captured.
    """
    from rich.progress import track

    step_cache = step_cache_of(lm)
    if step_cache is None:
        raise ValueError(
            f"steps are captured on a single CUDA device, and where captures_steps is not False; got {lm.device}"
        )
    drafter = SuffixDrafter() if drafter is None else load(drafter, lm)
    arguments = GenerateArguments(
        growth=growth, verifier=verifier, sampling=Sampling() if sampling is None else sampling, max_length=max_length,
        stop_token_ids=stop_token_ids, ignore_eos=ignore_eos,
    )  # fmt: skip
    cases = [*product(batch_sizes, budgets)]
    for batch, budget in track(cases, "capturing steps", disable=not shows_progress, transient=True):
        prompts = [list(prompt)] * batch
        if isinstance(budget, str):
            _capture_every_size(lm, prompts, drafter, replace(arguments, budget=budget))
        else:
            _capture_size(lm, prompts, drafter, replace(arguments, budget=budget), budget)
    return step_cache.report()


def compile_steps(
    lm: TreeLM,
    drafter: Drafter,
    *,
    growth: Growth | str | None = None,
    budget: int | str | None = None,
    verifier: str = "auto",
    batches: Iterable[Sequence[Sampling]] = ((GREEDY,),),
) -> float:
    """Generate a few tokens that are discarded, so that what a step compiles or loads at first use is ready.

    What fails here is left to the text to come, which reports it together with what was generated.

    Args:
        lm: the target.
        drafter: what will draft.
        growth: as for ``generate``.
        budget: likewise; for "auto" a step of at most START nodes is taken.
        verifier: likewise.
        batches: one for each kind of batch to come: how the tokens of each of its sequences are drawn.

    Returns:
        Seconds that it took.
    """
    began = time.perf_counter()
    growth = parse_growth(growth) if isinstance(growth, str) else growth
    policy = _step_of_one_size if budget is None or isinstance(budget, str) else None
    for batch in batches:
        arguments = GenerateArguments(
            growth=growth, budget=budget, verifier=verifier, sampling=[*batch], policy=policy,
            max_new_tokens=FEW_TOKENS, ignore_eos=True,
        )  # fmt: skip
        with suppress(GenerationError):
            run(lm, [[*SHORT_PROMPT]] * len(batch), drafter, arguments)
    return time.perf_counter() - began


def _step_of_one_size(growth: Growth | None, sizes: Sequence[int]) -> BudgetPolicy:
    """Take steps of one size, so that no controller learns from their times."""
    small = [size for size in sizes if 1 < size <= START]
    return BudgetPolicy(growth, small[-1] if small else sizes[-1])


def _capture_size(
    lm: TreeLM, prompts: Sequence[Sequence[int]], drafter: Drafter, arguments: GenerateArguments, budget: int
) -> None:
    """Take enough steps of one budget."""
    tokens, max_length = STEPS * budget + 1, arguments.max_length
    least = tokens + len(prompts[0]) - 1
    if max_length is not None and max_length <= least:
        raise ValueError(f"max_length must be above {least} to capture steps of {budget} nodes, got {max_length}")
    steps = 0
    while steps < STEPS:  # a stop token may end a text early
        stats = run(lm, prompts, drafter, replace(arguments, max_new_tokens=tokens, seed=steps)).stats
        steps += stats["steps"] or STEPS


def _capture_every_size(
    lm: TreeLM, prompts: Sequence[Sequence[int]], drafter: Drafter, arguments: GenerateArguments
) -> None:
    """Take enough steps of all sizes that a budget chooses from, in as many texts as that takes."""
    every_size, seed = EverySize(STEPS), 0
    tokens = (arguments.max_length or 0) - len(prompts[0])
    while not every_size.is_done:
        stats = run(
            lm, prompts, drafter,
            replace(
                arguments, max_new_tokens=tokens, seed=seed, policy=every_size.over,
                cancelled=lambda _: every_size.is_done,
            ),
        ).stats  # fmt: skip
        if not stats["steps"]:
            length, prompt = arguments.max_length, len(prompts[0])
            raise ValueError(f"max_length {length} leaves no room for a step behind {prompt} tokens")
        seed += 1
