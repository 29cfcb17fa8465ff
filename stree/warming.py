"""Capturing steps before the first text, which would otherwise be slowed down by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from rich.progress import track

from stree.budget.policy import EverySize
from stree.decode.cuda_graphs import WARM_UP
from stree.decode.request import GenerateArguments
from stree.decode.step_cache import step_cache_of
from stree.drafters import Drafter, SuffixDrafter, load
from stree.generation import run
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["warm_up"]

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
