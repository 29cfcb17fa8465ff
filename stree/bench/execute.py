"""Run one method on a batch of prompts, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stree.bench.methods import ASSISTED, Method
from stree.bench.pair import Pair
from stree.bench.peers import PEERS
from stree.bench.records import Record
from stree.bench.sequential import ReplayLM, SnapshotLM
from stree.bench.unrolled import UnrolledLM
from stree.decode.stats import PARTS
from stree.decode.step_cache import step_cache_of
from stree.decode.step_records import AcceptedCounts, StepRecord
from stree.drafters import DRAFTERS, Drafter, FusedDrafter, SuffixDrafter, load
from stree.generation import GenerationError, generate
from stree.kernels.clock import compile_seconds
from stree.models.state_size import measure_state
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["COUNTS", "Case", "Run", "execute", "figures"]

MAX_RUNS = 5  # two warm up, the third captures CUDA graphs; the rest is for graphs that a capture makes necessary
COUNTS = ("steps", "sequence_steps", "tau", "acceptance_by_depth", "rows", "draft_calls")


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a method.

    Attributes:
        prompts: token lists.
        new_tokens: tokens that every sequence emits; no stop token is used.
        temperature: 0 for greedy.
        seed: of the random numbers.
        return_steps: whether what happens in every step is reported, too, which takes time.
        top_k: tokens that sampling keeps, or None for all.
        top_p: probability of the smallest set of tokens that sampling keeps, or None for all.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    temperature: float
    seed: int = 0
    return_steps: bool = False
    top_k: int | None = None
    top_p: float | None = None

    @property
    def sampling(self) -> Sampling:
        """Temperature, top-k and top-p."""
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True, slots=True)
class Run:
    """The output of a method.

    Attributes:
        tokens: new tokens of each prompt.
        seconds: wall time from prompts to last token, prefill included.
        ttft_s: seconds to the first token, or None where that is not known.
        stats: those of ``stree.generate``; of another library only counts of steps and what they accepted.
        steps: for each prompt what happened in its steps, where it is reported.
    """

    tokens: list[list[int]]
    seconds: float
    ttft_s: float | None
    stats: dict[str, Any]
    steps: list[list[StepRecord]] | None = None


def execute(pair: Pair, method: Method, case: Case) -> Run:
    """Run a method until one run has captured no CUDA graph and compiled nothing, and return that run.

    Raises:
        NotImplementedError: this pair, machine or version cannot run the method; the message says why.
    """
    if method.is_peer:
        return _run_peer(pair, method, case)
    lm = pair.target if method.baseline is None else _baseline(method.baseline, pair.target)
    drafter = _drafter(pair, method)
    for _ in range(MAX_RUNS):
        before = _prepared(pair)
        try:
            run = _run(lm, drafter, method, case)
        except GenerationError:
            step_cache = step_cache_of(pair.target)
            if step_cache is None or not step_cache.report():
                raise
            step_cache.release()  # the graphs of other methods may have held the memory that was missing
            continue
        graphs = run.stats.get("graphs")
        is_replayed = graphs is None or graphs["replays"] == run.stats["steps"]
        if is_replayed and _prepared(pair) == before:
            break
    return run


def _baseline(name: str, target: TreeLM) -> TreeLM:
    """Make the model that verifies trees in another way."""
    kinds: dict[str, type[UnrolledLM | SnapshotLM | ReplayLM]] = {
        "unrolled": UnrolledLM, "snapshot": SnapshotLM, "replay": ReplayLM
    }  # fmt: skip
    return kinds[name](target)


def figures(run: Run) -> Record:
    """Compute the figures of a run that its record holds; seconds by part are sums over all steps."""
    stats = run.stats
    shares = [_distinct_4grams(text) for text in run.tokens]
    return {
        **{name: stats[name] for name in COUNTS},
        "verified": stats["nodes_per_step"] * stats["steps"],
        "node_bytes": stats.get("node_bytes"),
        "ttft_s": run.ttft_s,
        "distinct_4grams": sum(shares) / len(shares),
        "tokens": [run.tokens],
        **{part: stats.get(part, 0.0) for part in (*PARTS, "prefill_s")},
    }


def _distinct_4grams(tokens: Sequence[int]) -> float:
    """Share of a text's 4-grams that are distinct; 1 for a text too short to have any."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def _run_peer(pair: Pair, method: Method, case: Case) -> Run:
    """Run another library's generation."""
    options: dict[str, Any] = {"top_k": case.top_k, "top_p": case.top_p}
    options |= {"drafted": int(method.budget) - 1} if method.kind in ASSISTED else {}
    began = time.perf_counter()
    out = PEERS[method.drafter](pair, case.prompts, case.new_tokens, case.temperature, case.seed, **options)
    seconds = time.perf_counter() - began
    counts = AcceptedCounts.of([0] * (case.new_tokens - 1) if out.accepted is None else out.accepted)
    rows = [counts.report()] * len(case.prompts)
    stats = {
        **counts.report(), "sequence_steps": counts.steps * len(rows), "rows": rows, "draft_calls": 0,
        "nodes_per_step": float(method.budget),
    }  # fmt: skip
    return Run(out.tokens, seconds, out.ttft_s, stats)


def _run(lm: TreeLM, drafter: Drafter, method: Method, case: Case) -> Run:
    """Generate once, timed."""
    began = time.perf_counter()
    out = generate(
        lm,
        case.prompts,
        drafter,
        growth=method.growth,
        budget=method.budget,
        verifier=method.verifier,
        sampling=case.sampling,
        max_new_tokens=case.new_tokens,
        ignore_eos=True,
        seed=case.seed,
        allow_lossy=method.is_lossy,
        return_steps=case.return_steps,
    )
    seconds = time.perf_counter() - began
    stats = {**out.stats, "node_bytes": _node_bytes(lm)}
    return Run(out.new_tokens, seconds, out.stats["prefill_s"], stats, out.steps)


def _node_bytes(lm: TreeLM) -> int | None:
    """Return the bytes kept for a pending node, keys and values not counted; None where paths are kept, not nodes."""
    if isinstance(lm, (SnapshotLM, ReplayLM)):
        return lm.node_bytes
    return None if isinstance(lm, UnrolledLM) else measure_state(lm).stash_per_node


def _prepared(pair: Pair) -> tuple[int, float]:
    """Count captured graphs and seconds of compilation, which the first runs of a method add to."""
    step_cache = step_cache_of(pair.target)
    num_graphs = 0 if step_cache is None else sum(decode_step["graphs"] for decode_step in step_cache.report())
    return num_graphs, compile_seconds()


def _drafter(pair: Pair, method: Method) -> Drafter:
    """Find or make the drafter of a method; captured steps belong to one drafter object, so it is kept."""
    if method.name not in pair.drafters:
        pair.drafters[method.name] = _new_drafter(pair, method)
    return pair.drafters[method.name]


def _new_drafter(pair: Pair, method: Method) -> Drafter:
    if method.drafter in DRAFTERS:
        return DRAFTERS[method.drafter](pair.target)
    draft = pair.drafter or pair.head
    if draft is None:
        raise NotImplementedError(f"method {method.name!r} needs a draft model or head; give one with --drafter")
    model = load(draft, pair.target)
    return model if method.drafter == "model" else FusedDrafter(model, SuffixDrafter())
