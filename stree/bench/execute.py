"""One run of one method on a batch of prompts, and what it took."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import stree.drafters
from stree.bench.baselines import BaselineLM, SnapshotLM, UnrolledLM, state_bytes
from stree.bench.memory import peak_mib, reset_peak
from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.peers import PEERS
from stree.bench.watch import Counts, Watch
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.generation import generate
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["Case", "Run", "execute"]


@dataclass(frozen=True, slots=True)
class Case:
    """What a method is run on.

    Attributes:
        prompts: token lists.
        new_tokens: tokens that every sequence emits; no stop token is used.
        temperature: 0 for greedy.
        seed: of the random numbers.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    temperature: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        tokens: new tokens of each prompt.
        seconds: wall time from prompts to last token, prefill included.
        ttft_s: seconds to the first token, or None where that is not known.
        stats: those of ``stree.generate``; steps, tau and nodes only for another library.
        counts: what was tested and accepted.
        peak_mib: peak memory, or None where this machine does not tell.
        state_bytes: of decoding state and stash at their largest, or None for another library.
    """

    tokens: list[list[int]]
    seconds: float
    ttft_s: float | None
    stats: dict[str, Any]
    counts: Counts
    peak_mib: float | None
    state_bytes: int | None


def execute(pair: Pair, method: Method, case: Case) -> Run:
    """Run a method once.

    Raises:
        NotImplementedError: this pair, machine or version cannot run the method; the message says why.
    """
    device = pair.target.device
    watch = Watch()
    drafter = None if method.is_peer else watch.over(_drafter(pair, method))
    is_known = reset_peak(device)
    began = time.perf_counter()
    if drafter is None:
        tokens, first = PEERS[method.drafter](pair, case.prompts, case.new_tokens, case.temperature, case.seed)
        seconds = time.perf_counter() - began
        stats: dict[str, Any] = {"steps": case.new_tokens - 1, "tau": 1.0, "nodes_per_step": 1.0, "draft_calls": 0}
        counts, size = Counts(), None
    else:
        lm = _engine(pair, method)
        out = generate(
            cast(TreeLM, lm), case.prompts, drafter, method.growth, method.budget, method.verifier,
            Sampling(case.temperature), case.new_tokens, seed=case.seed, allow_lossy=method.is_lossy,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        tokens = [text[len(prompt) :] for text, prompt in zip(out.sequences, case.prompts, strict=True)]
        stats, first, counts = out.stats, out.stats["prefill_s"], watch.counts()
        budget = stats["budget"]
        size = _state_bytes(lm, case, budget if isinstance(budget, int) else math.ceil(stats["nodes_per_step"]))
    if not counts.reached:  # nothing was drafted
        counts.reached[0] = stats["steps"] * len(tokens)
    return Run(tokens, seconds, first, stats, counts, peak_mib(device) if is_known else None, size)


def _engine(pair: Pair, method: Method) -> TreeLM | BaselineLM:
    """Choose what verifies."""
    if method.engine == "tree":
        return pair.target
    return UnrolledLM(pair.target) if method.engine == "unrolled" else SnapshotLM(pair.target)


def _drafter(pair: Pair, method: Method) -> Drafter:
    """Make what drafts."""
    if method.drafter == "none":
        return NoDrafter()
    if method.drafter == "suffix":
        return SuffixDrafter()
    if pair.drafter is None:
        raise NotImplementedError(f"method {method.name!r} needs a draft model; give one with --drafter")
    model = ModelDrafter(pair.drafter)
    if method.drafter == "model":
        return model
    fused = getattr(stree.drafters, "FusedDrafter", None)
    if fused is None:
        raise NotImplementedError("this version has no FusedDrafter")
    return cast(Drafter, fused(model, SuffixDrafter()))


def _state_bytes(lm: TreeLM | BaselineLM, case: Case, budget: int) -> int:
    """Count what the states of a run take with a stash for ``budget`` nodes."""
    if isinstance(lm, BaselineLM):
        assert lm.state is not None, "the run has made a state"
        return lm.state.peak_bytes
    width = max(map(len, case.prompts))
    per_state, per_node = state_bytes(lm, width + case.new_tokens + budget)
    return len(case.prompts) * (per_state + budget * per_node)
