"""Compiling and capturing steps before the first text, which would otherwise be slowed down by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

from stree.budget.controller import START
from stree.budget.policy import BudgetPolicy, EverySize
from stree.decode.batching import batch_for
from stree.decode.capture import WARM_UP
from stree.decode.settings import Settings
from stree.decode.step_cache import step_cache_of
from stree.drafters import Drafter, SuffixDrafter
from stree.generation import GenerationError, run
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import Verifier

__all__ = ["ALL_BATCHES", "compile_steps", "warm_up"]

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
ALL_BATCHES = (GREEDY,), (SAMPLED,), (GREEDY, GREEDY), (GREEDY, SAMPLED)  # a greedy batch runs other code
SHORT_PROMPT, FEW_TOKENS = (1, 1, 1, 1), 4  # a text that has a step, and repeats itself
STEPS = 2 * WARM_UP + 2  # memory that a first text allocates on the way drops its graphs


def warm_up(
    lm: TreeLM,
    drafter: Drafter | None = None,
    *,
    growth: Growth | str | None = None,
    max_length: int,
    budgets: Sequence[int | str] = ("auto",),
    batch_sizes: Sequence[int] = (1,),
    sampling: Sampling | None = None,
    verifier: str | Verifier = "auto",
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
    drafter = SuffixDrafter() if drafter is None else drafter
    settings = partial(Settings, lm, drafter, growth=growth, verifier=verifier)
    options = {
        "sampling": sampling, "max_length": max_length, "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos,
    }  # fmt: skip
    cases = [*product(batch_sizes, budgets)]
    for batch, budget in track(cases, "capturing steps", disable=not shows_progress, transient=True):
        prompts = [list(prompt)] * batch
        if isinstance(budget, str):
            _capture_every_size(partial(settings, budget=budget), prompts, options)
        else:
            _capture_size(settings(budget=budget), budget, prompts, options)
    return step_cache.report()


def compile_steps(
    lm: TreeLM,
    drafter: Drafter,
    *,
    growth: Growth | str | None = None,
    budget: int | str | None = None,
    verifier: str | Verifier = "auto",
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
    policy = _step_of_one_size if budget is None or isinstance(budget, str) else None
    settings = Settings(lm, drafter, growth=growth, budget=budget, verifier=verifier, policy=policy)
    for sampling in batches:
        batch = batch_for(
            lm, [SHORT_PROMPT] * len(sampling), sampling=[*sampling], max_new_tokens=FEW_TOKENS, ignore_eos=True
        )
        with suppress(GenerationError):
            run(settings, batch)
    return time.perf_counter() - began


def _step_of_one_size(growth: Growth | None, sizes: Sequence[int]) -> BudgetPolicy:
    """Take steps of one size, so that no controller learns from their times."""
    small = [size for size in sizes if 1 < size <= START]
    return BudgetPolicy(growth, small[-1] if small else sizes[-1])


def _capture_size(
    settings: Settings, budget: int, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> None:
    """Take enough steps of one budget."""
    tokens, max_length = STEPS * budget + 1, options["max_length"]
    least = tokens + len(prompts[0]) - 1
    if max_length <= least:
        raise ValueError(f"max_length must be above {least} to capture steps of {budget} nodes, got {max_length}")
    steps = 0
    while steps < STEPS:  # a stop token may end a text early
        stats = run(settings, batch_for(settings.lm, prompts, max_new_tokens=tokens, seed=steps, **options)).stats
        steps += stats["steps"] or STEPS


def _capture_every_size(
    make: Callable[..., Settings], prompts: Sequence[Sequence[int]], options: Mapping[str, Any]
) -> None:
    """Take enough steps of all sizes that a budget chooses from, in as many texts as that takes."""
    every_size = EverySize(STEPS)
    settings = make(policy=every_size.over, cancelled=lambda _: every_size.is_done)
    length, prompt, seed = options["max_length"], len(prompts[0]), 0
    while not every_size.is_done:
        batch = batch_for(settings.lm, prompts, max_new_tokens=length - prompt, seed=seed, **options)
        if not run(settings, batch).stats["steps"]:
            raise ValueError(f"max_length {length} leaves no room for a step behind {prompt} tokens")
        seed += 1
