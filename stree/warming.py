"""Capturing steps before the first text comes, which else pays for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from rich.progress import track

from stree.budget.policy import EverySize
from stree.decode.cuda_graphs import WARM_UP
from stree.decode.step_cache import step_cache_of
from stree.drafters import Drafter, SuffixDrafter
from stree.generation import generate, run
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["warm_up"]

STEPS = 2 * WARM_UP + 2  # what a first text makes room for on the way begins the count anew


def warm_up(
    lm: TreeLM,
    drafter: Drafter | None = None,
    growth: Growth | None = None,
    *,
    max_length: int,
    budgets: Sequence[int | str] = ("auto",),
    batch_sizes: Sequence[int] = (1,),
    sampling: Sampling | None = None,
    verifier: str = "auto",
    stop_token_ids: Iterable[int] | None = None,
    prompt: Sequence[int] = (1,),
    shows_progress: bool = True,
) -> list[dict[str, Any]]:
    """Capture the steps of every batch size and budget, so that ``generate`` with the same arguments finds them.

    Args:
        lm: the target.
        drafter: the very object that will draft.
        growth: as for ``generate``.
        max_length: as for ``generate``, which must be told it too.
        budgets: nodes a step, of which ``generate`` must name one; "auto" for all sizes that it chooses from.
        batch_sizes: sequences at once.
        sampling: as for ``generate``.
        verifier: as for ``generate``.
        stop_token_ids: as for ``generate``.
        prompt: one like those to come; what "auto" measures is measured behind it.
        shows_progress: whether to show a bar.

    Returns:
        What is kept, a program an entry: its batch, room and bytes, its graphs, and what could not be captured and why.

    Raises:
        ValueError: no room for a few steps, or steps of this model are not captured.
    """
    step_cache = step_cache_of(lm)
    if step_cache is None:
        raise ValueError(
            f"steps are captured on a single CUDA device, and where captures_steps is not False; got {lm.device}"
        )
    stop = [] if stop_token_ids is None else list(stop_token_ids)
    cases = [*product(batch_sizes, budgets)]
    for batch, budget in track(cases, "capturing steps", disable=not shows_progress, transient=True):
        prompts = [list(prompt)] * batch
        if isinstance(budget, str):
            drafter = SuffixDrafter() if drafter is None else drafter
            _tour(
                lm, prompts, drafter, growth, budget=budget, max_length=max_length, sampling=sampling,
                verifier=verifier, stop_token_ids=stop,
            )  # fmt: skip
            continue
        tokens = STEPS * budget + 1
        if tokens + len(prompt) > max_length:
            least = tokens + len(prompt) - 1
            raise ValueError(f"max_length must be above {least} to capture steps of {budget} nodes, got {max_length}")
        taken = 0
        while taken < STEPS:  # a stop token may end a text early
            stats = generate(
                lm, prompts, drafter, growth, budget, verifier, sampling, tokens, stop, seed=taken,
                max_length=max_length,
            ).stats  # fmt: skip
            taken += stats["steps"] or STEPS
    return step_cache.report()


def _tour(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    growth: Growth | None,
    *,
    budget: str,
    max_length: int,
    sampling: Sampling | None,
    verifier: str,
    stop_token_ids: Sequence[int],
) -> None:
    """Take all sizes that a budget chooses from, in as many texts as that takes."""
    tour, seed = EverySize(STEPS), 0
    while not tour.is_done:
        stats = run(
            lm, prompts, drafter, growth=growth, budget=budget, verifier=verifier,
            sampling=Sampling() if sampling is None else sampling, max_new_tokens=max_length - len(prompts[0]),
            stop_token_ids=stop_token_ids, processor=None, seed=seed, streamer=None, max_length=max_length,
            steered=tour.over, cancelled=lambda _: tour.is_done,
        ).stats  # fmt: skip
        if not stats["steps"]:
            raise ValueError(f"max_length {max_length} leaves no room for a step behind {len(prompts[0])} tokens")
        seed += 1
