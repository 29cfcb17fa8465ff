"""budget="auto": outputs do not change and do not depend on the clock; trees are drafted where they pay.

The tests replace the clock by a simulated one.
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from helpers.fast_cases import slow_unless
from helpers.tiny_models import patched, random_texts, tiny_model
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, DraftRun, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, DepthStop, DySpec, Eagle2, Growth, Plan, Static
from stree.growth.base import BaseGrowth
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9], [1, 2, 4, 1, 2, 4, 1]]


@cache
def target() -> stree.TreeLM:
    return patched(tiny_model("bamba"))


def useless() -> stree.TreeLM:
    return patched(tiny_model("mamba2", seed=1))


@cache
def same() -> stree.TreeLM:
    return patched(tiny_model("bamba"))


def plain_texts(**options: Any) -> list[list[int]]:
    return stree.generate(target(), PROMPTS, NoDrafter(), budget=1, **options).sequences


class Clock:
    """A simulated clock: a call of a model advances it by a given time, reading it by ``reading_s``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reading_s: float = 0.05) -> None:
        self.now, self.patch, self.reading_s = 0.0, monkeypatch, reading_s
        monkeypatch.setattr(time, "perf_counter", self.read)

    def read(self) -> float:
        self.now += self.reading_s
        return self.now

    def slow(self, lm: stree.TreeLM, call_s: float, node_s: float = 0.0) -> stree.TreeLM:
        verify = lm.verify

        def slow(state: Any, tree: TokenTree, first: int = 0) -> Tensor:
            self.now += call_s + node_s * tree.tokens.shape[1]
            return verify(state, tree, first)

        self.patch.setattr(lm, "verify", slow)
        return lm


@pytest.fixture
def cheap_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all steps take the same time, so that trees pay."""
    Clock(monkeypatch)


class Doubling(Drafter, DraftRun):
    """A drafter of the user's own, which drafts the pending token again and says nothing of its worth."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Doubling:
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        tokens = pending[:, None].repeat(1, min(budget, 2))
        return Draft(TokenTree.chain(tokens), None, tokens.shape[1] - 1)

    def observe(self, acceptance: Acceptance) -> None:
        pass


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "default": lambda: None,
    "suffix": SuffixDrafter,
    "model": lambda: ModelDrafter(useless()),
    "trimmed": lambda: ModelDrafter(useless(), vocab=range(60)),
    "fused": lambda: FusedDrafter(ModelDrafter(useless()), SuffixDrafter()),
    "user": Doubling,
}


@pytest.mark.parametrize("name", slow_unless(("default", "model", "user").__contains__, DRAFTERS))
def test_texts_are_those_of_plain_decoding(name: str, cheap_trees: None) -> None:
    for sampling in (Sampling(), Sampling(0.8)):
        options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 12}
        out = stree.generate(target(), PROMPTS, DRAFTERS[name](), budget="auto", verifier="match", **options)
        assert out.sequences == plain_texts(**options) and out.stats["budget"] == "auto"
        assert out.stats["nodes_per_step"] > 1


GROWTHS: dict[str, Growth] = {
    "heap": DySpec(form="heap"), "large": Static([70]), "depth-stop": DepthStop(Eagle2()),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWTHS)
def test_outputs_with_each_kind_of_growth_are_those_of_plain_decoding(name: str, cheap_trees: None) -> None:
    options: dict[str, Any] = {"budget": "auto", "max_new_tokens": 12}
    out = stree.generate(target(), PROMPTS, ModelDrafter(same()), growth=GROWTHS[name], **options)
    assert out.sequences == plain_texts(max_new_tokens=12) and out.stats["nodes_per_step"] > 1.3
    sampled = stree.generate(
        target(), PROMPTS, ModelDrafter(same()), growth=GROWTHS[name], sampling=Sampling(0.8), **options
    )
    assert [len(text) for text in sampled.sequences] == [len(text) for text in out.sequences]


class Opaque(BaseGrowth):
    """A growth without a depth: all of it or nothing."""

    def plan(self, budget: int) -> Plan:
        return Calibrated(depth=2).bind(self.sampling).plan(min(budget, 9))


def test_a_growth_of_the_user_s_own(cheap_trees: None) -> None:
    out = stree.generate(target(), PROMPTS, ModelDrafter(useless()), growth=Opaque(), budget="auto", max_new_tokens=12)
    assert out.sequences == plain_texts(max_new_tokens=12)


class Reader:
    """A streamer that takes some time of a clock for what a step emits."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def put(self, value: Tensor) -> None:
        self.clock.now += self.seconds

    def end(self) -> None:
        pass


def sizes(
    monkeypatch: pytest.MonkeyPatch, drafts: stree.TreeLM, call_s: float, node_s: float, *, read_s: float = 0.0
) -> stree.Generation:
    """Sample 60 tokens.

    A call of the target takes 1 s + ``node_s`` per node, one of the draft model ``call_s``, and between two steps the
    reader of the text takes ``read_s``.
    """
    clock, prompts = Clock(monkeypatch, 1e-4), random_texts(random.Random(0), [9])
    lm, drafter = clock.slow(patched(tiny_model("bamba")), 1.0, node_s), ModelDrafter(clock.slow(drafts, call_s))
    options: dict[str, Any] = {"sampling": Sampling(0.5), "max_new_tokens": 60, "streamer": Reader(clock, read_s)}
    return stree.generate(lm, prompts, drafter, growth=DySpec(depth=4), budget="auto", **options)


@pytest.mark.slow
def test_trees_are_drafted_where_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = sizes(monkeypatch, patched(tiny_model("bamba")), 0.05, 0.005)
    slow_drafts = sizes(monkeypatch, patched(tiny_model("bamba")), 5.0, 0.005)
    slow_nodes = sizes(monkeypatch, patched(tiny_model("bamba")), 0.05, 1.0)
    wrong = sizes(monkeypatch, useless(), 0.5, 0.05)
    assert cheap.stats["tau"] > 2 and cheap.stats["nodes_per_step"] > 6
    assert slow_drafts.stats["nodes_per_step"] < 3 and wrong.stats["nodes_per_step"] < 4
    assert slow_nodes.stats["nodes_per_step"] < cheap.stats["nodes_per_step"] / 2
    assert cheap.sequences != slow_drafts.sequences, "negative control: a sampled text depends on the tree sizes"


def test_time_between_steps_is_time_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = (sizes(monkeypatch, patched(tiny_model("bamba")), 0.7, 0.005, read_s=read_s) for read_s in (0.0, 9.0))
    assert quick.stats["nodes_per_step"] < 5 < 6 < slow.stats["nodes_per_step"]


def test_a_model_can_be_copied_and_pickled_after_a_generation_under_auto() -> None:
    lm = patched(tiny_model("bamba"))
    options: dict[str, Any] = {"budget": "auto", "max_new_tokens": 8}
    expected = stree.generate(lm, PROMPTS[:1], ModelDrafter(useless()), **options).sequences
    for copied in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert stree.generate(copied, PROMPTS[:1], ModelDrafter(useless()), **options).sequences == expected
