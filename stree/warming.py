"""Compiling steps before the first text, which would otherwise be slowed down by it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from stree.budget.controller import START
from stree.budget.policy import BudgetPolicy
from stree.decode.batching import batch_for
from stree.decode.settings import Settings
from stree.drafters import Drafter
from stree.generation import GenerationError, run
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import Verifier

__all__ = ["ALL_BATCHES", "compile_steps"]

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
ALL_BATCHES = (GREEDY,), (SAMPLED,), (GREEDY, GREEDY), (GREEDY, SAMPLED)  # a greedy batch runs other code
SHORT_PROMPT, FEW_TOKENS = (1, 1, 1, 1), 4  # a text that has a step, and repeats itself


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
