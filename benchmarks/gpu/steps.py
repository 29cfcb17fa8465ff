"""Times whole steps of a target at the shapes of published models, with random weights: verify of a tree, and commit.

Run: python -m benchmarks.gpu.steps --out DIR [--models NAME ...] [--sizes 1x256 ...] [--minutes 9]
Without a GPU: python -m benchmarks.gpu.steps --smoke, which runs tiny models, without graphs.

A step starts as in the middle of a text: verify applies the deferred commit of the path of the step before, and commit
defers its own.  Steps are timed as replays of a CUDA graph and as plain calls, beside the same graph with Mamba-2
mixers in one launch and without fused layers, transformers' own forward of one token, and mamba-ssm's one-token decode
with its CUDA graph where it is installed.  Every record has the bytes that the step must move, and their time at the
bandwidth of a copy in the same run.  Sizes of which figures are asked first come first: batch 1 and context 256 of
every model; 1, 16 and 64 nodes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

import stree
from benchmarks.gpu.models import DTYPES, configurations, free, model_of
from benchmarks.gpu.peer_steps import mamba_ssm_step, why_not
from benchmarks.gpu.run import Run, begin, command_line
from stree.bench import device_clock
from stree.bench.device_clock import time_calls, time_graph
from stree.bench.predictions import predicted_ms
from stree.bench.profile import bytes_moved, copy_bandwidth
from stree.bench.records import Record
from stree.models.bounded_scan import memory_bounded

__all__ = ["NODES", "bytes_of", "measure", "state_for", "step_of"]

NODES = (1, 16, 64, 4, 8, 32)
PLAIN_NODES = (1, 16)  # that are timed without fused layers, with fused mixers and without a graph, too
SIZES = ((1, 256), (8, 256), (1, 4096), (8, 4096))  # batch, tokens of context
PATH = 3  # most nodes of a committed path
MIXERS, UNFUSED = "graph, fused mixers", "graph, unfused"
BUILT = [(n, provider) for provider, sizes in (("eager", NODES), (MIXERS, PLAIN_NODES)) for n in sizes]
ROOM = 512  # tokens that repeated steps may commit


@dataclass(frozen=True)
class Step:
    """A step to time: the model's name, batch, tokens of context, nodes, and who runs it."""

    model: str
    batch: int
    context: int
    n: int
    provider: str

    def __str__(self) -> str:
        """Name the case."""
        return f"{self.model}, batch {self.batch}, context {self.context}, nodes {self.n}, {self.provider}"


def measure(
    run: Run, smoke: bool, names: Collection[str] | None = None, sizes: Sequence[tuple[int, int]] = SIZES,
    *, is_timed: bool = True,
) -> None:  # fmt: skip
    """Add a record for every size, model (or those of ``names``), number of nodes and provider until the time is up.

    A step that fails gives a record with its problem, and the others are measured.  If not ``is_timed``, each step of
    ours is run once without a record, so that Triton's cache holds its builds.
    """
    bandwidth = copy_bandwidth(run.device)
    shapes = configurations(smoke)
    cases = [
        Step(name, batch, context, n, provider)
        for batch, context in (((1, 8),) if smoke else sizes)
        for name in shapes if names is None or name in names
        for n, provider in (_providers(run.device) if is_timed else BUILT)
    ]  # fmt: skip
    bench = _Bench(run.device, shapes)
    for case in run.cases(cases):
        with run.part(
            adds=is_timed, bench="step", metric="latency", unit="us", dtype=str(DTYPES[run.device.type])[6:],
            bytes_per_s=bandwidth, provider=case.provider,
            params={"model": case.model, "batch": case.batch, "context": case.context, "n": case.n},
        ) as record:  # fmt: skip
            if not is_timed:
                bench.step(case)()
                continue
            record |= bench.cost(case)
            record |= bench.time(case)
            if "p50" in record and "bytes" in record:
                bound = 1e6 * sum(record["bytes"].values()) / bandwidth
                record |= {"bound_us": bound, "of_bound": bound / record["p50"]}
                expected = predicted_ms(case.model, case.n, bandwidth)
                if expected is not None and (case.batch, case.context, case.provider) == (*SIZES[0], "graph"):
                    record["predicted_us"] = 1e3 * expected["total"]


class _Bench:
    """The model and the decode state that steps run on; changed where a case needs others.

    Args:
        device: where steps run.
        shapes: configurations by model name.
    """

    def __init__(self, device: torch.device, shapes: dict[str, PreTrainedConfig]) -> None:
        self.device, self.shapes = device, shapes
        self._lm: stree.TreeLM | None = None
        self._state: Any = None
        self._key: tuple[str, int, int, bool] | None = None

    def time(self, case: Step) -> Record:
        """Time a step by its provider."""
        lm = self._model(case)
        if case.provider == "transformers":
            return time_calls(_one_token(lm, case.batch), self.device)
        if case.provider == "mamba_ssm":
            reason = why_not(self.shapes[case.model], self.device)
            return {"unavailable": reason} if reason else mamba_ssm_step(
                self.shapes[case.model], case.batch, case.context, lm.dtype
            )  # fmt: skip
        lm.fused_layers = case.provider != UNFUSED
        try:
            return (time_calls if case.provider == "eager" else time_graph)(self.step(case), self.device)
        finally:
            lm.fused_layers = True

    def step(self, case: Step) -> Callable[[], Any]:
        """Make a call that runs a step of ours."""
        return step_of(self._model(case), self._state, case.n, case.context)

    def cost(self, case: Step) -> Record:
        """Bytes that a step of ours keeps and moves; nothing for another library's."""
        if case.provider in ("transformers", "mamba_ssm"):
            return {}
        moved = bytes_of(self._model(case), case.batch, case.context, case.n)
        return {"state_dtype": "float32", "state_bytes": self._state.num_bytes, "bytes": moved}

    def _model(self, case: Step) -> stree.TreeLM:
        if self._lm is None or self._key is None or self._key[0] != case.model:
            self._lm = self._state = self._key = None
            free(self.device)
            self._lm = model_of(self.shapes[case.model], self.device)
        self._lm.fused_mixers = case.provider == MIXERS
        key = (case.model, case.batch, case.context, self._lm.fused_mixers)
        if self._key != key or self._state.is_inconsistent:  # by a step that failed half way
            self._state = None
            self._state, self._key = state_for(self._lm, case.batch, case.context), key
        return self._lm


def _providers(device: torch.device) -> list[tuple[int, str]]:
    """List nodes and the ways to run a step of so many; what is compared with one node comes right after it."""
    if device.type != "cuda":
        return [(n, "eager") for n in NODES] + [(1, "transformers"), (1, "mamba_ssm")]
    graphs = [(n, "graph") for n in NODES[:3]] + [(1, "transformers"), (1, "mamba_ssm")]
    graphs += [(n, "graph") for n in NODES[3:]]
    return graphs + [(n, provider) for provider in (MIXERS, UNFUSED, "eager") for n in PLAIN_NODES]


def step_of(lm: stree.TreeLM, state: Any, n: int, context: int) -> Callable[[], Any]:
    """A call that verifies a binary tree and commits its leftmost path; the text may not outgrow the state."""
    state.lengths.fill_(context)
    state.length_bound = context
    return device_clock.step_of(lm, state, n, PATH)


def state_for(lm: stree.TreeLM, batch: int, context: int) -> Any:
    """Make a state that claims ``context`` tokens; what it holds is random, since only time is measured."""
    state = lm.new_state(batch, context + ROOM, max(NODES), fixed_shapes=True)
    lm.prefill(state, torch.randint(lm.vocab_size, (batch, 4)).to(lm.device))
    generator = torch.Generator(lm.device).manual_seed(0)  # not the device's own, as above
    for stack in state.stacks.values():
        for _, tensor in stack.tensors():
            if tensor.shape[2:3] and not bool(tensor.any()):
                tensor.normal_(std=0.02, generator=generator)
    return state


def bytes_of(lm: stree.TreeLM, batch: int, context: int, n: int) -> dict[str, int]:
    """Bytes that a step must move; of experts, as many as uniform routing is expected to reach."""
    moved = bytes_moved(lm, batch=batch, length=context, nodes=n)
    experts = {id(p): p for module in lm.model.modules() if type(module).__name__.endswith("Experts")
               for p in module.parameters()}  # fmt: skip
    if experts:
        chosen = lm.model.config.num_experts_per_tok
        held = sum(p.nbytes for p in experts.values())
        reached = sum(p.nbytes * (1 - (1 - chosen / p.shape[0]) ** (batch * n)) for p in experts.values())
        moved["weights"] += math.ceil(reached) - held
    return moved


def _one_token(lm: stree.TreeLM, batch: int) -> Any:
    """A call of transformers' own forward for one token after a short prompt."""
    options: Record = {"use_cache": True, lm.cache_argument: lm.family.new_cache(lm.model.config)}
    with torch.no_grad(), memory_bounded():
        lm.model(torch.ones(batch, 8, dtype=torch.long, device=lm.device), **options)
    if lm.family.takes_positions:
        options["position_ids"] = torch.full((batch, 1), 8, device=lm.device)
    return torch.no_grad()(partial(lm.model, torch.ones(batch, 1, dtype=torch.long, device=lm.device), **options))


def main() -> int:
    """Measure the models that were asked for, and print the table last."""
    parser = command_line(__doc__, "gpu_steps.jsonl")
    known = [name for smoke in (False, True) for name in configurations(smoke)]
    parser.add_argument("--models", nargs="+", choices=known, help="names of configurations; all if not given")
    parser.add_argument("--sizes", nargs="+", type=_size, default=SIZES, help="batch and context, as 1x256")
    parser.add_argument("--build", action="store_true", help="only run each step once, untimed")
    options, run = begin(parser)
    measure(run, options.smoke, options.models, options.sizes, is_timed=not options.build)
    titles = ["model", "batch", "context", "nodes", "provider", "us", "predicted", "bound / it"]
    return run.report(titles, _rows(run.records))


def _size(text: str) -> tuple[int, int]:
    try:
        batch, context = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be BATCHxCONTEXT, as 1x256, got {text}") from None
    return batch, context


def _rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """Lines of the table of timed steps."""
    for record in records:
        if "p50" in record:
            params = [str(value) for value in record["params"].values()]
            share = f"{record['of_bound']:.2f}" if "of_bound" in record else "-"
            expected = f"{record['predicted_us']:.0f}" if "predicted_us" in record else "-"
            yield [*params, record["provider"], f"{record['p50']:.0f}", expected, share]


if __name__ == "__main__":
    sys.exit(main())
