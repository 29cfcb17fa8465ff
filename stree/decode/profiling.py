"""Profile step latency and acceptance per tree size with a short warm-up generation whose output is discarded.

Results are kept with the target and never measured again, so that a text is always given the same budgets.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stree.budget.policy import TreeSizes
from stree.decode.logits_processors import Node, with_processor
from stree.decode.loop import DecodeLoop
from stree.decode.request import Request, Slots
from stree.decode.step_cache import StepCache
from stree.decode.step_profiler import StepProfiler
from stree.decode.step_times import GUESS, StepTimes
from stree.drafters import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["num_profiled", "step_times"]

OPENING = 12  # most tokens of the caller's first prompt that a text continues

logger = logging.getLogger("stree")

_profiled: weakref.WeakKeyDictionary[TreeLM, dict[tuple[Any, ...], StepTimes]] = weakref.WeakKeyDictionary()


def step_times(
    lm: TreeLM,
    drafter: Drafter,
    sizes: TreeSizes,
    batch: int,
    opening: Sequence[int],
    request: Request,
    *,
    verifier: str,
    step_cache: StepCache | None,
) -> StepTimes:
    """Return latency and acceptance of steps, measured before the first text of a kind.

    A drafter without a model counts as free, as a lookup is, and so does a logits processor: neither is run on a text
    that is not the caller's.

    Args:
        lm: the target.
        drafter: its models' calls are timed, with everything that a step does around them.
        sizes: to choose from.
        batch: sequences.
        opening: the caller's first prompt.
        request: sampling, and the processor, of which only matters whether it reads texts.
        verifier: see ``stree.accept``.
        step_cache: captures steps, which are then timed as they are replayed; None where they are launched.
    """
    models, sampling = drafter.models, request.sampling
    looks_at_text = None if request.processor is None else request.processor.looks_at_text
    key = (
        batch, tuple(map(weakref.ref, models)), type(drafter) if models else None, tuple(sizes.choices),
        None if sizes.growth is None else repr(sizes.growth.bind(Sampling())), verifier,
        (sampling.is_greedy, sampling.top_k is None, sampling.top_p is None), step_cache is not None, looks_at_text,
        torch.get_num_threads(),
    )  # fmt: skip
    profiled = _profiled.setdefault(lm, {})
    for old in [old for old in profiled if any(model() is None for model in old[1])]:
        del profiled[old]  # its draft model is gone
    if key not in profiled:
        on_device = lm.device.type == "cuda" or step_cache is not None
        profiler = StepProfiler(sizes, has_model=bool(models), on_device=on_device)
        stand_in = drafter if models else _BinaryTrees()
        if looks_at_text is not None:
            lm, stand_in = with_processor(lm, stand_in, _Identity(looks_at_text), is_greedy=True)
        try:
            _generate(lm, stand_in, profiler, opening, batch, sampling, verifier, step_cache)
            profiled[key] = profiler.times()
        except Exception as problem:  # the caller's own text may not meet it
            name = type(problem).__name__
            logger.warning("what steps take could not be measured, sizes are guessed: %s: %s", name, problem)
            return GUESS
    return profiled[key]


def num_profiled(lm: TreeLM) -> int:
    """Count the kinds of steps that were profiled for a target."""
    return len(_profiled.get(lm, {}))


def _generate(
    lm: TreeLM,
    drafter: Drafter,
    profiler: StepProfiler,
    opening: Sequence[int],
    batch: int,
    sampling: Sampling,
    verifier: str,
    step_cache: StepCache | None,
) -> None:
    """Generate until all steps were taken, with a step cache of their own: none that is kept for texts is dropped."""
    step_cache = None if step_cache is None else StepCache(step_cache.recorder)
    needed = OPENING + profiler.most_tokens + profiler.max_nodes
    length = needed if lm.max_length is None else min(needed, lm.max_length)
    while not profiler.is_done:
        left = profiler.num_left
        text = _piece(opening, profiler.begin(), lm.max_length)
        request = Request(
            sampling=sampling, max_new_tokens=length - len(text), seed=left, cancelled=lambda _: profiler.is_paused
        )
        loop = DecodeLoop(lm, Slots(iter([(text, None)] * batch), batch, length), request, verifier, step_cache)
        loop.run(drafter, profiler)
        if loop.problem is not None:
            raise loop.problem
        if profiler.num_left == left:
            raise RuntimeError(f"texts of {length} tokens leave no room for a step")


def _piece(opening: Sequence[int], share: float, max_length: int | None) -> list[int]:
    """The last tokens of the first ``share`` of a prompt, at most an eighth of the longest text."""
    most = OPENING if max_length is None else min(OPENING, max(max_length // 8, 1))
    end = max(round(share * len(opening)), 1)
    return list(opening[max(end - most, 0) : end])


class _Identity:
    """A processor that leaves logits as they are."""

    def __init__(self, looks_at_text: bool) -> None:
        self.looks_at_text = looks_at_text

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        return logits


class _BinaryTrees(Drafter, DraftRun):
    """Drafts binary trees of two tokens, as large as the budget: the largest ones that retrieval may propose."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _BinaryTrees:
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        index = torch.arange(budget, device=pending.device)
        parents = ((index + 1) // 2 - 1).to(torch.int32).expand(len(pending), -1).contiguous()
        tokens = (index % 2).repeat(len(pending), 1)
        tokens[:, 0] = pending
        return Draft(TokenTree.unchecked(tokens, parents), None, budget.bit_length() - 1)

    def observe(self, acceptance: Acceptance) -> None:
        pass
