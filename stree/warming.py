"""Capturing steps before the first text comes, which else pays for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from rich.progress import track

from stree.drafters import Drafter
from stree.engine import engine_of
from stree.generation import generate
from stree.graphs import WARM_UP
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
    budgets: Sequence[int] = (16,),
    batch_sizes: Sequence[int] = (1,),
    sampling: Sampling | None = None,
    verifier: str = "auto",
    stop_token_ids: Iterable[int] | None = None,
    shows_progress: bool = True,
) -> list[dict[str, Any]]:
    """Capture the steps of every batch size and budget, so that ``generate`` with the same arguments finds them.

    Args:
        lm: the target.
        drafter: the very object that will draft.
        growth: as for ``generate``.
        max_length: as for ``generate``, which must be told it too.
        budgets: nodes a step, of which ``generate`` must name one; under "auto" sizes are captured as they are chosen.
        batch_sizes: sequences at once.
        sampling: as for ``generate``.
        verifier: as for ``generate``.
        stop_token_ids: as for ``generate``.
        shows_progress: whether to show a bar.

    Returns:
        What is kept, a program an entry: its batch, room and bytes, its graphs, and what could not be captured and why.

    Raises:
        ValueError: no room for a few steps, or steps of this model are not captured.
    """
    engine = engine_of(lm)
    if engine is None:
        raise ValueError(
            f"steps are captured on a single CUDA device, and where is_captured is not False; got {lm.device}"
        )
    stop = frozenset(stop_token_ids or ())
    cases = [*product(batch_sizes, budgets)]
    for batch, budget in track(cases, "capturing steps", disable=not shows_progress, transient=True):
        tokens = STEPS * budget + 1
        if tokens >= max_length:
            raise ValueError(f"max_length must be above {tokens} to capture steps of {budget} nodes, got {max_length}")
        taken = 0
        while taken < STEPS:  # a stop token may end a text early
            stats = generate(
                lm, [[1]] * batch, drafter, growth, budget, verifier, sampling, tokens, stop, seed=taken,
                max_length=max_length,
            ).stats  # fmt: skip
            taken += stats["steps"] or STEPS
    return engine.report()
