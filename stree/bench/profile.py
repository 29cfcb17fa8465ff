"""``stree bench profile``: where the time of a step goes, and how near its bytes come to the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor

from stree.bench.module_timer import ModuleTimer
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.decode.stats import PARTS
from stree.decode.step_cache import StepCache, step_cache_of
from stree.decode.step_result import StepTimer
from stree.drafters import Drafter, ModelDrafter, SuffixDrafter
from stree.generation import generate
from stree.growth import Growth
from stree.kernels.clock import wait_for
from stree.models.state_size import measure_state, modules_by_kind, weight_bytes
from stree.models.tree_lm import TreeLM
from stree.models.tree_step import TreeStep
from stree.sampling import Sampling

__all__ = ["Shape", "bytes_moved", "copy_bandwidth", "profile", "profile_tables"]

WARM_UP = 16  # tokens
COPIED = 2**28  # bytes of the buffer by which the bandwidth is measured


@dataclass(frozen=True, slots=True)
class Shape:
    """What is run.

    Attributes:
        growth: of a model drafter's trees, or None for the default.
        budget: most nodes a step, root included.
        batch: sequences.
        context: tokens of the prompts.
        new_tokens: tokens that each sequence emits while timed.
        temperature: 0 is greedy.
    """

    growth: Growth | None
    budget: int
    batch: int
    context: int
    new_tokens: int
    temperature: float

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Make prompts of arbitrary tokens: int[batch][context]."""
        rows = torch.arange(self.batch * self.context).view(self.batch, -1)
        return cast(list[list[int]], (rows * 7919 % vocab_size).tolist())

    def runner(self, pair: Pair) -> Callable[[int], dict[str, Any]]:
        """Make the function that generates so many tokens, always with the same drafter, and returns the statistics."""
        drafter: Drafter = SuffixDrafter() if pair.drafter is None else ModelDrafter(pair.drafter)
        return lambda tokens: generate(
            pair.target, self.prompts(pair.target.vocab_size), drafter, growth=self.growth, budget=self.budget,
            sampling=Sampling(self.temperature), max_new_tokens=tokens, ignore_eos=True,
        ).stats  # fmt: skip


def profile(pair: Pair, shape: Shape) -> Record:
    """Generate with every stateful layer and the draft model timed.

    Where steps are captured they are also timed as they then run, replayed, without a view of their parts; the parts
    are those of steps launched operation by operation.

    Args:
        pair: the models; without a draft model the suffix drafter drafts.
        shape: of the generation.

    Returns:
        Milliseconds a step by part, bytes a verification moves by kind, and the bandwidth of this run; under
        "replayed", milliseconds of a step that is replayed, the share of it between replays ("idle"), and what a
        replayed step without the models' forwards takes of it ("outside_forwards"); or None.
    """
    lm, draft, run = pair.target, pair.drafter, shape.runner(pair)
    run(WARM_UP)  # compilation and automatic checks
    step_cache = step_cache_of(lm)
    replayed = None if step_cache is None else _replayed(run, step_cache, [lm, draft], shape.new_tokens)
    stats, inside = _launched(pair, lambda: run(shape.new_tokens))
    steps = max(stats["steps"], 1)
    whole = stats["total_s"] - stats["prefill_s"]
    parts = _parts(stats, inside, whole)
    moved = bytes_moved(
        lm, batch=shape.batch, length=shape.context + shape.new_tokens / 2, nodes=stats["nodes_per_step"]
    )
    bandwidth = copy_bandwidth(lm.device)
    bound_ms = 1e3 * sum(moved.values()) / bandwidth
    verify_ms = 1e3 * (stats["verify_s"] + stats["commit_s"]) / steps
    return {
        "bench": "profile",
        "params": {
            "budget": shape.budget, "growth": stats["growth"], "batch": shape.batch, "context": shape.context,
            "new_tokens": shape.new_tokens, "temperature": shape.temperature,
        },
        "steps": stats["steps"], "tau": stats["tau"], "draft_calls": stats["draft_calls"],
        "step_ms": 1e3 * whole / steps, "replayed": replayed,
        "ms": {name: 1e3 * seconds / steps for name, seconds in parts.items()},
        "bytes": moved, "bytes_per_s": bandwidth, "verify_ms": verify_ms, "bound_ms": bound_ms,
        "of_bound": bound_ms / verify_ms,
    }  # fmt: skip


def _launched(pair: Pair, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, float]]:
    """Run with launched steps; return the statistics, and seconds by layer kind, output head and draft model."""
    lm, draft = pair.target, pair.drafter
    modules = [*modules_by_kind(lm), ("output head", lm.model.get_output_embeddings())]
    kinds = list(dict.fromkeys(name for name, _ in modules))
    drafts = [] if draft is None else [("draft", draft.model)]
    timer = ModuleTimer(lm.model)
    was, lm.captures_steps = lm.captures_steps, False
    try:
        with timer.over([*modules, *drafts, ("target", lm.model)]):
            stats = run()
    finally:
        lm.captures_steps = was
    return stats, timer.seconds([*kinds, "draft"])


def _parts(stats: dict[str, Any], inside: dict[str, float], whole: float) -> dict[str, float]:
    """Divide the seconds of all steps into parts."""
    parts = {"draft model": inside.pop("draft")}
    parts["growth"] = stats["draft_s"] - parts["draft model"]
    parts |= {f"verify: {name}": seconds for name, seconds in inside.items()}
    parts["verify: the rest"] = stats["verify_s"] - sum(inside.values())
    parts |= {"accept": stats["accept_s"], "commit": stats["commit_s"]}
    parts["host and idle"] = whole - sum(parts.values())
    return parts


def _replayed(
    run: Callable[[int], dict[str, Any]], step_cache: StepCache, models: Sequence[TreeLM | None], tokens: int
) -> Record:
    """Time replayed steps, then captured steps without the models' forwards."""
    whole_ms, busy_ms, stats = _steps_ms(run, tokens)
    step_cache.release()
    try:
        with _without_forwards([model for model in models if model is not None]):
            _, beside_ms, _ = _steps_ms(run, tokens)
    finally:
        step_cache.release()
    return {
        "step_ms": whole_ms, "idle": max(1 - busy_ms / whole_ms, 0.0), "outside_forwards": beside_ms / whole_ms,
        **stats["graphs"],
    }  # fmt: skip


def _steps_ms(run: Callable[[int], dict[str, Any]], tokens: int) -> tuple[float, float, dict[str, Any]]:
    """Time the second of two runs, whose graphs the first has captured: a step, and of it what the device works."""
    run(tokens)
    stats = run(tokens)
    scale = 1e3 / max(stats["steps"], 1)
    return scale * (stats["total_s"] - stats["prefill_s"]), scale * sum(stats[part] for part in PARTS), stats


@contextmanager
def _without_forwards(models: Sequence[TreeLM]) -> Iterator[None]:
    """Replace the forward of models over trees by logits computed once; prompts are still run."""
    for lm in models:
        lm.forward = partial(_answer, lm.forward, {})  # type: ignore[method-assign]
    try:
        yield
    finally:
        for lm in models:
            del lm.forward


def _answer(
    forward: Callable[..., Tensor],
    known: dict[torch.Size, Tensor],
    tokens: Tensor,
    cache: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return logits of int64[batch, n] nodes: those of the first tree of this size."""
    if not isinstance(cache, TreeStep):
        return forward(tokens, cache, *args, **kwargs)
    if tokens.shape not in known:
        known[tokens.shape] = forward(tokens, cache, *args, **kwargs)
    return known[tokens.shape]


def bytes_moved(lm: TreeLM, *, batch: int, length: float, nodes: float) -> dict[str, int]:
    """Count what a verification and its commit must move: each weight and state once, whatever the tree.

    All experts of a layer are counted, as a tree may reach them all.

    Args:
        lm: the target.
        batch: sequences.
        length: committed tokens of each.
        nodes: of a tree, root included.

    Returns:
        Bytes by what they are.
    """
    memory = measure_state(lm)
    return {
        "weights": weight_bytes(lm),
        "states, read and written": 2 * batch * (memory.state + memory.window),
        "keys and values": round(batch * length * memory.kv_per_token),
        "stash, written": round(batch * nodes * (memory.stash_per_node + memory.kv_stash_per_node)),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Measure the memory's bandwidth by copying a large buffer: bytes read and written a second, the best of five."""
    source = torch.ones(COPIED // 4, device=device)
    target = torch.empty_like(source)
    clock = StepTimer(device)
    for number in range(6):
        target.copy_(source)
        clock.lap(f"copy {number}")
    wait_for(device)
    return 2 * COPIED / min(clock.seconds().values())


def profile_tables(record: Record) -> list[Table]:
    """Make tables of a profile: the parts of a step, and the bytes of a verification."""
    params = " ".join(f"{name}={value}" for name, value in record["params"].items())
    parts = Table("part", "ms a step", "share", title=f"step ({params})")
    for name, ms in record["ms"].items():
        parts.add_row(name, f"{ms:.3f}", f"{ms / record['step_ms']:.1%}")
    parts.add_row("whole step", f"{record['step_ms']:.3f}", "", end_section=True)
    if record["replayed"] is not None:
        replayed = record["replayed"]
        shares = f"idle {replayed['idle']:.1%}, outside the forwards {replayed['outside_forwards']:.1%}"
        parts.add_row(f"replayed, {shares}", f"{replayed['step_ms']:.3f}", "", end_section=True)
    moved = Table("moved by verify and commit", "MB", title="roofline")
    for name, count in record["bytes"].items():
        moved.add_row(name, f"{count / 1e6:.2f}")
    rate, bound = record["bytes_per_s"] / 1e9, record["bound_ms"]
    moved.add_row(f"at {rate:.1f} GB/s, as a copy reaches in this run", f"{bound:.3f} ms", end_section=True)
    moved.add_row("verify and commit took", f"{record['verify_ms']:.3f} ms, bound {record['of_bound']:.0%} of it")
    return [parts, moved]
