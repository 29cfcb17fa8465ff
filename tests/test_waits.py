"""A step is a device program: it waits for the device nowhere, and every step runs what every other runs.

What a GPU would run is run on the CPU, under a watch over host reads and a trace of operators and sizes.

Run: python -m pytest tests/test_waits.py
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.host_reads import NoHostReads, Trace
from helpers.tiny_models import grafted, random_texts, tiny_model
from torch import Tensor

import stree
from stree.drafters import Bounded, ModelDrafter, NoDrafter
from stree.growth import (
    RSDS,
    Calibrated,
    Chain,
    Confidence,
    DecisionStop,
    DepthStop,
    DySpec,
    Eagle2,
    Growth,
    OptTree,
    Sequoia,
    SpecInfer,
    Static,
)
from stree.kernels import tiles, topology
from stree.program import Program
from stree.sampling import Random, Sampling

STEPS = 10
GROWTHS: dict[str, Growth | None] = {
    "none": None,
    "chain": Chain(3),
    "static": Static([2, 2]),
    "sequoia": Sequoia(depth=3),
    "dyspec": DySpec(depth=3),
    "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=3),
    "specinfer": SpecInfer([2, 2]),
    "rsds": RSDS(3, 3),
    "opt-tree": OptTree(depth=3),
    "eagle2": DepthStop(Eagle2(depth=3, beam=3), threshold=-2.0, layers=None),
    "decision": DecisionStop(Chain(3, stop=Confidence(0.02)), threshold=0.1),
}
TEXTS = random_texts(random.Random(0), [6, 6])


class Watch(Trace):
    """A trace of a step that reads nothing."""

    def __enter__(self) -> Watch:
        self._reads = NoHostReads()
        self._reads.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(topology, "waits_always", True)
    yield


def program(
    growth: Growth | None, temperature: float, stop: list[int] | None = None, *, defers_commit: bool = False
) -> Program:
    """Begin two texts as a session would."""
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    target.defers_commit = draft.defers_commit = defers_commit
    state = target.new_state(2, 512, 16)
    state.fixed_shapes = topology.waits_always
    rng = Random(0, torch.arange(2), torch.tensor([6, 6]))
    drafter = NoDrafter() if growth is None else ModelDrafter(draft)
    begun = Program(target, state, rng, sampling=Sampling(temperature), verifier="auto", stop_token_ids=stop or [])
    logits = begun.fill(drafter, TEXTS, 500, seed=0)
    if isinstance(begun.run, Bounded):
        begun.run.reserve(512, growth, 12, begins=True)
    for row, token in enumerate(logits.argmax(-1).tolist()):
        begun.begin(row, token, is_finished=False)
    return begun


def run_steps(begun: Program, growth: Growth | None, *watches: Any) -> list[list[int]]:
    """Run steps, each under one of the watches or none; return the new tokens, read when all have been launched."""
    steps = []
    for watch in watches:
        with watch:
            steps.append(begun.step(growth, 12))
    texts: list[list[int]] = [[], []]
    for step in steps:
        for text, tokens in zip(texts, step.emitted()[0], strict=True):
            text += tokens
    return texts


def bound(name: str, temperature: float) -> Growth | None:
    growth = GROWTHS[name]
    return None if growth is None else growth.bind(Sampling(temperature))


@pytest.mark.parametrize(
    ("name", "temperature", "defers_commit"),
    [*((name, temperature, False) for name in GROWTHS for temperature in (0.0, 0.8)), ("calibrated", 0.8, True)],
)
def test_ten_steps_read_nothing_and_are_one_program(
    name: str, temperature: float, defers_commit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = bound(name, temperature)
    plain = [contextlib.nullcontext()] * STEPS
    on_host = run_steps(program(growth, temperature), copy.deepcopy(growth), *plain)
    monkeypatch.setattr(topology, "waits_always", True)
    begun = program(growth, temperature, defers_commit=defers_commit)
    # The first step makes what the others find made: index tensors, room for the plan's columns.
    run = run_steps(begun, growth, NoHostReads())
    places = persistent(begun)
    traces = [Watch() for _ in range(STEPS - 1)]
    texts = run_steps(begun, growth, *traces)
    assert [one + more for one, more in zip(run, texts, strict=True)] == on_host
    assert persistent(begun) == places and len(places) > 10
    first, *others = [trace.seen for trace in traces]
    assert len(first) > 100
    for later in others:
        differing = [(one, other) for one, other in zip(first, later, strict=False) if one != other]
        assert later == first, differing[:1] or (len(first), len(later))


def persistent(begun: Program) -> dict[str, int]:
    """List where the tensors of a program, of its states and of what its draft run learns lie."""
    places: dict[str, int] = {}

    def note(name: str, holder: Any) -> None:
        for key, value in vars(holder).items():
            if isinstance(value, Tensor):
                places[f"{name}.{key}"] = value.data_ptr()

    note("program", begun)
    for name, holder in (("target", begun.state), ("draft", getattr(begun.run, "_state", None))):
        if holder is not None:
            note(name, holder)
            for number, stack in enumerate(holder.stacks.values()):
                note(f"{name}.{number}", stack)
    note("run", begun.run)
    learnt = getattr(begun.run, "_estimate", None)
    held = {"_level": ("shift", "weight"), "_memory": ("places", "last")}
    holders = [(learnt, ("_tests", "_passed")), *((getattr(learnt, name, None), keys) for name, keys in held.items())]
    for holder, keys in holders:
        places |= {key: getattr(holder, key).data_ptr() for key in keys if hasattr(holder, key)}
    return places


def test_the_watch_sees_what_the_cpu_reads() -> None:
    growth = bound("dyspec", 0.8)
    with pytest.raises(AssertionError, match="reads the device"):
        run_steps(program(growth, 0.8), growth, NoHostReads())


def test_the_trace_sees_that_the_cpu_s_steps_differ() -> None:
    traces, growth = [Trace() for _ in range(4)], bound("dyspec", 0.8)
    run_steps(program(growth, 0.8), growth, *traces)
    assert any(trace.seen != traces[1].seen for trace in traces[2:])


def test_a_stop_token_and_the_limit_end_sequences_without_the_host(as_on_a_device: None) -> None:
    lm = grafted(tiny_model("bamba"))
    drafter = ModelDrafter(grafted(tiny_model("mamba2", seed=1)))
    whole = stree.generate(lm, TEXTS, drafter, budget=16, max_new_tokens=24).sequences
    stop = whole[0][6 + 9]
    expected = []
    for text in whole:
        new = text[6:]
        expected.append(new[: new.index(stop) + 1] if stop in new else new)
    begun = program(Chain(3), 0.0, [stop])
    begun.limit.fill_(24)
    texts = [[int(token)] for token in begun.pending]
    for _ in range(24):
        for text, tokens in zip(texts, begun.step(Chain(3), 4).emitted()[0], strict=True):
            text += tokens
    assert texts == expected and begun.is_finished.all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("growth", [Calibrated(depth=8), DySpec(depth=8), OptTree(), Eagle2(), DySpec(form="heap")])
def test_a_large_tree_of_fixed_shapes_fits_the_kernels(
    growth: Growth, temperature: float, as_on_a_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, sizes = stree.TreeLM.verify, set()

    def watched(self: stree.TreeLM, state: Any, tree: stree.TokenTree, first: int = 0) -> Tensor:
        sizes.add(tree.tokens.shape[1])
        assert state.max_nodes <= tiles.MAX_NODES
        return verify(self, state, tree, first)

    monkeypatch.setattr(stree.TreeLM, "verify", watched)
    lm, sampling = grafted(tiny_model("bamba")), Sampling(temperature)
    drafter = ModelDrafter(grafted(tiny_model("mamba2", seed=1)))
    found = stree.generate(lm, TEXTS, drafter, growth, 64, sampling=sampling, max_new_tokens=4, verifier="match")
    assert 64 in sizes and max(sizes) <= tiles.MAX_NODES
    monkeypatch.setattr(topology, "waits_always", False)
    plain = stree.generate(lm, TEXTS, budget=1, sampling=sampling, max_new_tokens=4)
    assert found.sequences == plain.sequences
