"""What a step of each size takes and brings, measured once: a few steps of the loop on texts that nobody reads.

It decides nothing.  What is measured is kept with the target and never measured again, so that whoever chooses sizes by
it chooses the same ones for the same text.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.budget.goodput import Experience
from stree.budget.policy import AutoBudget, TreeSizes
from stree.budget.tree_sizes import PLAIN, Choice
from stree.decode.cuda_graphs import WARM_UP
from stree.decode.logits_processors import Node, NodeProcessor, with_processor
from stree.decode.loop import DecodeLoop
from stree.decode.step_cache import StepCache
from stree.drafters import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["StepTimes", "num_profiled", "step_times"]

ROUNDS = 10  # of each size the first time warms the machine, of the others the median counts
LONGEST_S = 2.0  # of timed rounds, after which no other begins
SMALL, MIDDLE, LARGE = 4, 16, 64  # nodes of the trees that are timed; what lies between is interpolated
SHALLOW, DEEP = 2, 4  # and their draft calls
OPENING = 12  # tokens of the caller's first prompt that a text goes on from, at most

logger = logging.getLogger("stree")


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Milliseconds of a step: of plain decoding, and of a tree by its nodes and draft calls.

    Attributes:
        plain_ms: of plain decoding.
        nodes: float[points], rising.
        tree_ms: float[points], of trees of so many nodes without their draft calls; never falling.
        call_ms: of a draft call.
        behind_ms: that a tree takes more after plain decoding.
        experience: what steps brought; None where nothing was drafted that tells of other texts.
    """

    plain_ms: float
    nodes: np.ndarray
    tree_ms: np.ndarray
    call_ms: float = 0.0
    behind_ms: float = 0.0
    experience: Experience | None = None

    def __call__(self, nodes: np.ndarray, calls: np.ndarray) -> np.ndarray:
        """Give float[...] milliseconds of int[...] nodes, root included, and int[...] draft calls."""
        nodes, calls = np.broadcast_arrays(nodes, calls)
        tree = np.interp(nodes, self.nodes, self.tree_ms) + self.call_ms * calls
        return np.where((nodes == 1) & (calls == 0), self.plain_ms, np.maximum(tree, self.plain_ms))


# Before anything could be measured: a draft call is a quarter of a step, 64 nodes take twice what one does.
GUESS = StepTimes(1.0, np.array([1.0, 64.0]), np.array([1.0, 2.0]), 0.25)

_known: weakref.WeakKeyDictionary[TreeLM, dict[tuple[Any, ...], StepTimes]] = weakref.WeakKeyDictionary()


def step_times(
    lm: TreeLM,
    drafter: Drafter,
    sizes: TreeSizes,
    batch: int,
    opening: Sequence[int],
    *,
    sampling: Sampling,
    verifier: str,
    step_cache: StepCache | None,
    processor: NodeProcessor | None,
) -> StepTimes:
    """Give what steps take, measured before the first text of a kind.

    A drafter without a model counts as free, as looking something up is; so does what a processor does with a node's
    logits: neither is asked about a text that is none of the caller's.

    Args:
        lm: the target.
        drafter: its models' calls are timed, with everything that a step does around them.
        sizes: what will be chosen from.
        batch: sequences.
        opening: the caller's first prompt, for a text like it.
        sampling: how tokens are drawn.
        verifier: see ``stree.accept``.
        step_cache: captures steps, which are then timed as they are replayed; None where they are launched.
        processor: what will process logits, or None; only whether it looks at texts matters.
    """
    models = drafter.models
    looks_at_text = None if processor is None else processor.looks_at_text
    key = (
        batch, tuple(map(weakref.ref, models)), type(drafter) if models else None, tuple(sizes.choices),
        None if sizes.growth is None else repr(sizes.growth.bind(Sampling())), verifier,
        (sampling.is_greedy, sampling.top_k is None, sampling.top_p is None), step_cache is not None, looks_at_text,
        torch.get_num_threads(),
    )  # fmt: skip
    known = _known.setdefault(lm, {})
    for old in [old for old in known if any(model() is None for model in old[1])]:
        del known[old]  # its draft model is gone
    if key not in known:
        profiler = _Profiler(
            sizes, has_model=bool(models), on_device=lm.device.type == "cuda" or step_cache is not None
        )
        stand_in = drafter if models else _Bushy()
        if looks_at_text is not None:
            lm, stand_in = with_processor(lm, stand_in, _Untouched(looks_at_text), is_greedy=True)
        try:
            _run(lm, stand_in, profiler, opening, batch, sampling, verifier, step_cache)
            known[key] = profiler.times()
        except Exception as problem:  # the caller's own text will meet it, or not
            name = type(problem).__name__
            logger.warning("what steps take could not be measured, sizes are guessed: %s: %s", name, problem)
            return GUESS
    return known[key]


def num_profiled(lm: TreeLM) -> int:
    """Count the kinds of steps that were measured for a target."""
    return len(_known.get(lm, {}))


def _cut(opening: Sequence[int], share: float, max_length: int | None) -> list[int]:
    """Give the last tokens of the first ``share`` of a prompt, an eighth of the longest text at most."""
    most = OPENING if max_length is None else min(OPENING, max(max_length // 8, 1))
    end = max(round(share * len(opening)), 1)
    return list(opening[max(end - most, 0) : end])


def _run(
    lm: TreeLM,
    drafter: Drafter,
    profiler: _Profiler,
    opening: Sequence[int],
    batch: int,
    sampling: Sampling,
    verifier: str,
    step_cache: StepCache | None,
) -> None:
    """Generate until all steps were taken, with an engine of its own: nothing that is kept for texts is disturbed."""
    step_cache = None if step_cache is None else StepCache(step_cache.recorder)
    room = OPENING + profiler.most_tokens + profiler.max_nodes
    length = room if lm.max_length is None else min(room, lm.max_length)
    while not profiler.is_done:
        left = profiler.num_left
        text = _cut(opening, profiler.begin(), lm.max_length)
        loop = DecodeLoop(
            lm, [(text, None)] * batch, sampling=sampling, max_new_tokens=length - len(text), stop_token_ids=None,
            seed=left, max_batch=batch, max_length=length, cancelled=lambda _: profiler.is_paused,
            step_cache=step_cache,
        )  # fmt: skip
        loop.run(drafter, profiler, verifier)
        if loop.problem is not None:
            raise loop.problem
        if profiler.num_left == left:
            raise RuntimeError(f"texts of {length} tokens leave no room for a step")


class _Profiler(AutoBudget):
    """Takes steps of given sizes, small and large by turns, so that what disturbs the machine disturbs all of them.

    A controller learns from them, which takes its time too.  Every round is a text of its own, which goes on from
    another place of the prompt: one text agrees with its drafts more, another less.

    Args:
        sizes: of which a few are timed.
        has_model: whether draft calls are made, and so trees tell what others will bring.
        on_device: whether steps are captured, and launched before the last one is heard of: the second of two equal
            ones is timed.
    """

    def __init__(self, sizes: TreeSizes, *, has_model: bool, on_device: bool) -> None:
        super().__init__(sizes, GUESS)
        self._has_model, self._calls_matter = has_model, has_model and sizes.is_cut
        # Trees of a round.  The deepest one is not timed: its calls, which few nodes share, take less than others.
        self._trees = [(choice, "timed") for choice in _timed_choices(sizes)[:-1]]
        self._trees += [(choice, "") for choice in _deeper_choices(sizes)]
        self._on_device = on_device
        self._script = _script(self._trees, on_device, is_first=True)
        self._round, self._num_rounds = 0, ROUNDS
        self._deadline = math.inf  # known when the first step is timed
        self.most_tokens = sum(choice.depth + 1 for choice, _ in self._script) + 1
        self._begun = self._heard = 0  # of this round
        self._is_first, self._last = True, 0.0
        # Milliseconds by size, and the nodes and draft calls that it turned out to have.
        self._steps: dict[Choice, list[tuple[float, int, int]]] = {}
        self._behind: list[float] = []

    @property
    def num_left(self) -> int:
        """Steps not yet heard of, if the rounds to come are as long as this one."""
        return (self._num_rounds - self._round) * len(self._script) - self._heard

    @property
    def is_paused(self) -> bool:
        """Tell whether all steps of this round were heard of."""
        return self._heard == len(self._script)

    @property
    def is_done(self) -> bool:
        """Tell whether all steps were heard of."""
        return self.num_left == 0

    @property
    def is_off(self) -> bool:
        """Tell that trees will be drafted."""
        return False

    def begin(self) -> float:
        """Begin a text for what is left of a round, whose first step is not timed; give its share of the prompt."""
        if self.is_paused:
            self._round, self._heard = self._round + 1, 0
            self._trees.reverse()  # the larger ones first by turns: a text agrees with its drafts more and more
            self._script = _script(self._trees, self._on_device, is_first=False)
        self._begun, self._is_first = self._heard, True
        self._launched.clear()
        return 1 - self._round / self._num_rounds

    def next(self) -> tuple[Growth | None, int]:
        """Give the next size; plain decoding when all of a round were given."""
        choice = self._script[self._begun][0] if self._begun < len(self._script) else PLAIN
        self._begun += 1
        return self._launch(choice)

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Take the time since the last step was heard of."""
        super().observe(draft, acceptance)
        now = time.perf_counter()
        ms, self._last = 1e3 * (now - self._last), now
        if self.is_paused:
            return
        choice, timing = self._script[self._heard]
        self._heard += 1
        if timing:
            self._deadline = min(self._deadline, now - 1e-3 * ms + LONGEST_S)
        if self._is_first:
            self._is_first = False
        elif timing == "timed":
            self._steps.setdefault(choice, []).append((ms, draft.tree.tokens.shape[1], draft.num_calls))
        elif timing == "behind":
            self._behind.append(ms)
        if self.is_paused and now > self._deadline:
            self._num_rounds = self._round + 1

    def times(self) -> StepTimes:
        """Interpolate between what was timed."""
        usual = {choice: _usual(steps) for choice, steps in self._steps.items()}
        plain_ms = usual.pop(PLAIN)[0]
        trees = [usual[choice] for choice in sorted(usual, key=lambda choice: (choice.nodes, choice.depth))]
        call_ms = _call_ms(trees) if self._calls_matter else 0.0
        points = [(float(nodes), ms - call_ms * calls) for ms, nodes, calls in trees]
        if len(trees) > 1:  # below the smallest tree the first slope goes on; what draws nothing runs a root alone
            points.append((1.0, _below(points, plain_ms) if self._calls_matter else plain_ms))
        nodes = sorted({count for count, _ in points})
        tree_ms = [float(np.mean([ms for count, ms in points if count == known])) for known in nodes]
        behind_ms = max(float(np.median(self._behind)) - trees[0][0], 0.0) if self._behind else 0.0
        experience = self.controller.experience() if self._has_model else None
        return StepTimes(plain_ms, np.array(nodes), np.maximum.accumulate(tree_ms), call_ms, behind_ms, experience)


def _timed_choices(sizes: TreeSizes) -> list[Choice]:
    """Choose the sizes that are timed, smallest first, plain decoding last."""
    if len(sizes.choices) <= 3:
        return [*sizes.choices[1:], PLAIN]
    if not sizes.is_cut:
        return [*(Choice(nodes, nodes - 1) for nodes in (SMALL, MIDDLE, LARGE)), PLAIN]
    depths = sorted({choice.depth for choice in sizes.choices[1:]})
    deep = max(depth for depth in depths if depth <= DEEP)
    shallow = max((depth for depth in depths if depth <= min(SHALLOW, deep - 1)), default=deep)
    pairs = ((SMALL, shallow), (MIDDLE, shallow), (MIDDLE, deep), (LARGE, deep))
    return [*dict.fromkeys(Choice(nodes, depth) for nodes, depth in pairs), PLAIN]


def _deeper_choices(sizes: TreeSizes) -> list[Choice]:
    """Give the largest tree at its deepest, where no timed one is as deep: it tells what all others bring."""
    deepest = max(choice.depth for choice in sizes.choices)
    return [Choice(LARGE, deepest)] if sizes.is_cut and len(sizes.choices) > 3 and deepest > DEEP else []


def _script(trees: Sequence[tuple[Choice, str]], on_device: bool, *, is_first: bool) -> list[tuple[Choice, str]]:
    """List the steps of a round, each "timed", "behind" plain decoding, or neither."""
    if not on_device:
        small = min((choice for choice, _ in trees), key=lambda choice: choice.nodes)
        return [(small, ""), *trees, (PLAIN, ""), (PLAIN, "timed"), (PLAIN, "timed"), (small, "behind")]
    sizes = [*trees, (PLAIN, "timed")]
    pairs = [(choice, each) for choice, timing in sizes for each in ("", timing)]
    if not is_first:
        return pairs
    room = [(choice, "") for choice, _ in sizes]  # whatever a size makes room for, graphs are captured behind it
    return [*room, *[(choice, "") for choice, _ in sizes for _ in range(WARM_UP + 1)], *pairs]


def _usual(steps: Sequence[tuple[float, int, int]]) -> tuple[float, int, int]:
    """Give the median of what a size took, the first time left out."""
    warm = sorted(steps[1:] or steps)
    return warm[(len(warm) - 1) // 2]


def _call_ms(trees: Sequence[tuple[float, int, int]]) -> float:
    """Find what a draft call more takes, from trees that differ in their calls, but for what their nodes do."""
    pairs = [(before, after) for before, after in zip(trees, trees[1:], strict=False)]
    wider = [(m1 - m0) / (n1 - n0) for (m0, n0, c0), (m1, n1, c1) in pairs if n1 > n0 and c1 == c0]
    node_ms = max(wider[-1], 0.0) if wider else 0.0
    deeper = [(n1 - n0, (m1 - m0 - node_ms * (n1 - n0)) / (c1 - c0)) for (m0, n0, c0), (m1, n1, c1) in pairs if c1 > c0]
    return max(min(deeper, key=lambda pair: pair[0])[1], 0.0) if deeper else 0.0


def _below(points: Sequence[tuple[float, float]], plain_ms: float) -> float:
    """Go on with the first slope down to one node."""
    (nodes, ms), (more, later) = points[:2]
    slope = max((later - ms) / (more - nodes), 0.0) if more > nodes else 0.0
    return max(ms - slope * (nodes - 1), min(plain_ms, ms))


class _Untouched:
    """A processor that leaves logits as they are."""

    def __init__(self, looks_at_text: bool) -> None:
        self.looks_at_text = looks_at_text

    def __call__(self, nodes: Sequence[Node], logits: Tensor) -> Tensor:
        """Give them back."""
        return logits


class _Bushy(Drafter, DraftRun):
    """Drafts binary trees as large as the budget allows, of two tokens: what retrieval may propose at most."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _Bushy:
        """Begin."""
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Draft a tree."""
        index = torch.arange(budget, device=pending.device)
        parents = ((index + 1) // 2 - 1).to(torch.int32).expand(len(pending), -1).contiguous()
        tokens = (index % 2).repeat(len(pending), 1)
        tokens[:, 0] = pending
        return Draft(TokenTree.unchecked(tokens, parents), None, budget.bit_length() - 1)

    def observe(self, acceptance: Acceptance) -> None:
        """Learn nothing."""
