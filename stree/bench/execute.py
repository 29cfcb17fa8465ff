"""One run of one method on a batch of prompts, and what it took."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import stree.drafters
from stree.bench.baselines import BaselineLM, SnapshotLM, UnrolledLM, state_bytes
from stree.bench.memory import peak_mib, reset_peak
from stree.bench.methods import Method
from stree.bench.pair import Pair
from stree.bench.peers import PEERS
from stree.bench.watch import Counts, Watch
from stree.decode.profiling import num_measured
from stree.decode.step_cache import Engine, engine_of
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.generation import GenerationError, generate
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["Case", "Run", "execute"]

MOST_RUNS = 5  # two warm up, the third captures what a text takes once; the rest is for what that brings

# Drafters by method: a program whose steps are captured belongs to its drafter.
_KEPT: weakref.WeakKeyDictionary[Pair, dict[tuple[Any, ...], Drafter]] = weakref.WeakKeyDictionary()


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
    """Run a method once, timed.

    A run in which the library measured what steps take, before its text, is repeated.  Where steps are captured it is
    run again until nothing is captured any more, and the last run is given.  What a tree of fixed size drafted and had
    accepted is then counted in another run of the same text, whose steps are launched.

    Raises:
        NotImplementedError: this pair, machine or version cannot run the method; the message says why.
    """
    if method.is_peer:
        return _run_peer(pair, method, case)
    measured = num_measured(pair.target)
    run = _executed(pair, method, case)
    return run if num_measured(pair.target) == measured else _executed(pair, method, case)


def _executed(pair: Pair, method: Method, case: Case) -> Run:
    """Run a method, launched or captured and replayed."""
    # What reads trees on the host, or draws from the law that verification left, cannot be captured.
    engine = engine_of(pair.target) if method.engine == "tree" and not method.is_lossy else None
    if engine is None:
        return _launched(pair, method, case)
    run = _replayed(pair, method, case, engine)
    if method.drafter == "none" or method.budget == "auto":
        return run
    return replace(run, counts=_with_room(engine, lambda: _launched(pair, method, case)).counts)


def _run_peer(pair: Pair, method: Method, case: Case) -> Run:
    """Run another library's generation."""
    device = pair.target.device
    is_known = reset_peak(device)
    began = time.perf_counter()
    tokens, first = PEERS[method.drafter](pair, case.prompts, case.new_tokens, case.temperature, case.seed)
    seconds = time.perf_counter() - began
    stats: dict[str, Any] = {"steps": case.new_tokens - 1, "tau": 1.0, "nodes_per_step": 1.0, "draft_calls": 0}
    counts = _filled(Counts(), stats, tokens)
    return Run(tokens, seconds, first, stats, counts, peak_mib(device) if is_known else None, None)


def _launched(pair: Pair, method: Method, case: Case) -> Run:
    """Run a method under a watch, with steps that are launched and not captured."""
    watch = Watch()
    drafter = watch.over(_drafter(pair, method))
    was, pair.target.is_captured = pair.target.is_captured, False
    try:
        return _run(pair, method, case, drafter, watch)
    finally:
        pair.target.is_captured = was


def _replayed(pair: Pair, method: Method, case: Case, engine: Engine) -> Run:
    """Run a method until nothing was captured in a run, and all steps replayed where they can be."""
    known = _KEPT.setdefault(pair, {})
    key = method.name, method.drafter, pair.drafter
    drafter = known[key] if key in known else known.setdefault(key, _drafter(pair, method))

    def timed() -> Run:
        watch = Watch()
        with watch.over_sizes():
            return _run(pair, method, case, drafter, watch)

    for _ in range(MOST_RUNS):
        before = _num_graphs(engine)
        run = _with_room(engine, timed)
        if run.stats["graphs"]["replays"] == run.stats["steps"] and _num_graphs(engine) == before:
            break
    return run


def _run(pair: Pair, method: Method, case: Case, drafter: Drafter, watch: Watch) -> Run:
    """Generate, and take the time; ``watch`` is read after it."""
    device = pair.target.device
    lm = _engine(pair, method)
    is_known = reset_peak(device)
    began = time.perf_counter()
    out = generate(
        cast(TreeLM, lm), case.prompts, drafter, method.growth, method.budget, method.verifier,
        Sampling(case.temperature), case.new_tokens, seed=case.seed, allow_lossy=method.is_lossy,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    tokens = [text[len(prompt) :] for text, prompt in zip(out.sequences, case.prompts, strict=True)]
    stats, budget = out.stats, out.stats["budget"]
    counts = _filled(watch.counts(), stats, tokens)
    size = _state_bytes(lm, case, budget if isinstance(budget, int) else math.ceil(stats["nodes_per_step"]))
    return Run(tokens, seconds, stats["prefill_s"], stats, counts, peak_mib(device) if is_known else None, size)


def _with_room(engine: Engine, work: Callable[[], Run]) -> Run:
    """Run something, and again without what is kept for other texts if it fails: that may have held its memory."""
    try:
        return work()
    except (ValueError, GenerationError):
        engine.release()
    return work()


def _num_graphs(engine: Engine) -> int:
    """Count the graphs of all programs that are kept."""
    return sum(program["graphs"] for program in engine.report())


def _filled(counts: Counts, stats: dict[str, Any], tokens: list[list[int]]) -> Counts:
    """Count the steps, of all sequences, where nothing was drafted."""
    if not counts.reached:
        counts.reached[0] = stats["steps"] * len(tokens)
    return counts


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
