"""Verifiers, drafters, growths and stop rules of other authors in ``generate``, ``accept`` and the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.random_rows import random_rows
from helpers.tiny_models import patched, tiny_model
from torch import Tensor

import stree
from stree.drafters import DRAFTERS, Draft, Drafter, DraftRun, FusedDrafter, ModelDrafter, SuffixDrafter, load
from stree.growth import Chain, DepthStop, Growth, Static, Stop, Stopped, TargetInit
from stree.sampling import AnySampling, Random, Sampling
from stree.testing import TableLM, TableModel, table_drafter
from stree.tree import TokenTree
from stree.verify import SAMPLED, VERIFIERS, Acceptance, DraftProbs, Verifier, accept

TARGET, DRAFT = TableModel.random(5, 1), TableModel.random(5, 2)
PLAIN = Sampling(1.0)


class Rejection(Verifier):
    """Recursive rejection, without top-k."""

    def check(self, sampling: Sampling) -> None:
        if sampling.top_k is not None:
            raise ValueError(f"Rejection takes no top_k, got {sampling.top_k}")

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        return accept(tree, target_logits, sampling, rng, draft, "rejection", max_depth)


@dataclass(frozen=True)
class Unsure(Stop):
    """Ends a tree where the most probable token has less than ``least`` of a node's distribution."""

    least: float = 0.5

    def draws(self, values: Tensor, dist: Tensor) -> Tensor:
        return ((dist.amax(-1) > self.least) & (values > 0)).any(1)


@dataclass(frozen=True)
class OwnChain(Chain):
    """A growth of another author."""


class OwnDrafter(SuffixDrafter):
    """A drafter of another author."""


def generate(drafter: Drafter | None = None, **options: Any) -> stree.Generation:
    drafter = table_drafter(DRAFT) if drafter is None else drafter
    options = {"growth": Static([2, 1]), "budget": 5, "sampling": PLAIN, "max_new_tokens": 30, "seed": 4, **options}
    return stree.generate(TableLM(TARGET).as_lm(), [[0, 3], [2]], drafter, **options)


@pytest.mark.slow
def test_a_run_knows_the_sampling_of_its_rows_and_statistics_show_no_other() -> None:
    runs: list[Any] = []

    class Asking(Drafter):
        def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
            runs.append(SuffixDrafter().start(vocab_size, prompts, rng))
            return runs[0]  # type: ignore[no-any-return]

    generate(Asking(), sampling=[Sampling(0.7), Sampling(1.5, top_k=2)])
    logits = torch.randn(2, 5, dtype=torch.float64)
    probs = torch.cat([Sampling(0.7).probs(logits[:1]), Sampling(1.5, top_k=2).probs(logits[1:])])
    assert torch.allclose(runs[0].sampling.probs(logits), probs)
    stats = generate(sampling=Sampling(0.7)).stats
    assert (stats["growth"], stats["rule"]) == ("Static(shape=(2, 1))", "traversal")


def test_an_object_verifies_as_the_rule_of_a_name() -> None:
    own, named = generate(verifier=Rejection()), generate(verifier="rejection")
    assert own.sequences == named.sequences
    assert own.stats["tau"] == named.stats["tau"] > 1
    assert (own.stats["verifier"], own.stats["lossless"]) == ("Rejection", "claimed")
    assert json.loads(json.dumps(own.stats))["lossless"] == "claimed"


def test_a_verifier_in_the_registry_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "mine", Rejection())
    out = generate(verifier="mine")
    assert out.sequences == generate(verifier="rejection").sequences
    assert (out.stats["verifier"], out.stats["lossless"]) == ("mine", "claimed")


def test_a_sampling_that_a_verifier_does_not_take_is_refused_before_anything_runs() -> None:
    lm = TableLM(TARGET)
    mixed = [PLAIN, Sampling(0.7, top_k=2)]
    with pytest.raises(ValueError, match="Rejection takes no top_k, got 2"):
        stree.generate(lm.as_lm(), [[0], [1]], sampling=mixed, verifier=Rejection())
    assert lm.num_calls == 0
    with pytest.raises(ValueError, match="Rejection takes no top_k, got 2"):
        accept(TokenTree.chain([1, 2]), torch.zeros(1, 2, 4), mixed[1], random_rows(1), None, Rejection())


def test_an_engine_takes_a_verifier_and_refuses_a_request() -> None:
    lm = patched(tiny_model("mamba2"))
    options: dict[str, Any] = {"sampling": Sampling(0.8), "max_new_tokens": 12}
    with stree.Engine(lm, ModelDrafter(lm), budget=6, verifier=Rejection(), max_batch=2, max_length=64) as engine:
        handle = engine.submit([5, 6, 7], seed=3, **options)
        with pytest.raises(ValueError, match="Rejection takes no top_k, got 1"):
            engine.submit([5], sampling=Sampling(1.0, top_k=1), max_new_tokens=4)
        found = handle.result().sequences[0]
    alone = stree.generate(lm, [[5, 6, 7]], ModelDrafter(lm), budget=6, verifier="rejection", seed=3, **options)
    assert found == alone.sequences[0]


class Listing(Rejection):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return [0]


class Wide(Rejection):
    def __call__(self, *arguments: Any, **options: Any) -> Acceptance:
        accepted = super().__call__(*arguments, **options)
        return Acceptance(accepted.path.long(), accepted.path_lengths, accepted.next_token)


class Beyond(Rejection):
    def __call__(self, *arguments: Any, **options: Any) -> Acceptance:
        accepted = super().__call__(*arguments, **options)
        return Acceptance(accepted.path, accepted.path_lengths, accepted.next_token + 4)


@pytest.mark.parametrize(
    ("verifier", "error", "message"),
    [
        (Beyond(), ValueError, r"Beyond must return next_token in \[0, 4\), got \[[4-7]\]"),
        (Listing(), TypeError, r"Listing.__call__ must return a stree.Acceptance, got list"),
        (Wide(), TypeError, r"Wide.__call__ must return path int32\[batch, m\] = \[1, 2\], got int64\[1, 2\]"),
        (Rejection, TypeError, "verifier must be one of auto, .* or an object derived from stree.verify.Verifier"),
        (3, TypeError, "or an object derived from stree.verify.Verifier, got 3"),
        ("typical", ValueError, "verifier must be one of auto, match, rejection, traversal, block, got 'typical'"),
    ],
    ids=["token", "list", "dtype", "class", "number", "name"],
)
def test_what_is_no_verifier_is_refused(verifier: Any, error: type[Exception], message: str) -> None:
    tree = TokenTree.chain([1, 2])
    with pytest.raises(error, match=message):
        accept(tree, torch.zeros(1, 2, 4), PLAIN, random_rows(1), None, verifier)


MODEL = table_drafter(DRAFT)
CLAIMS: dict[str, tuple[bool | str, dict[str, Any]]] = {
    "own": (True, {}),
    "own greedy": (True, {"sampling": Sampling(), "growth": None}),
    "own, stopped": (True, {"growth": Chain(2, stop=stree.growth.Confidence(0.4))}),
    "not used": (True, {"drafter": SuffixDrafter(), "growth": OwnChain(2)}),
    "lossy": (False, {"growth": TargetInit(2, 1), "allow_lossy": True}),
    "drafter": ("claimed", {"drafter": OwnDrafter()}),
    "drafter within": ("claimed", {"drafter": FusedDrafter(MODEL, OwnDrafter()), "budget": 8}),
    "growth": ("claimed", {"growth": OwnChain(2)}),
    "growth within": ("claimed", {"growth": DepthStop(OwnChain(2))}),
    "stop rule": ("claimed", {"growth": Stopped(Static([2, 1]), Unsure())}),
    "stop rule of a chain": ("claimed", {"growth": Chain(2, stop=Unsure())}),
    "verifier": ("claimed", {"verifier": Rejection()}),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_statistics_say_whether_a_class_of_another_author_took_part(name: str) -> None:
    expected, options = CLAIMS[name]
    assert generate(max_new_tokens=8, **options).stats["lossless"] == expected


def test_a_drafter_in_the_registry_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "mine", lambda target: OwnDrafter())
    lm = TableLM(TARGET).as_lm()
    assert isinstance(load("mine", lm), OwnDrafter)
    with pytest.raises(ValueError, match="drafter must be 'suffix', 'none', 'mtp', 'mine', 'fused:PATH', .*, got 'my'"):
        load("my", lm)


@pytest.mark.parametrize("growth", [Stopped(Static([2, 1]), Unsure(1.0)), Chain(2, stop=Unsure(1.0))])
def test_a_stop_rule_of_another_author_ends_the_trees_of_any_growth(growth: Growth) -> None:
    stats = generate(growth=growth, max_new_tokens=12).stats
    assert stats["nodes_per_step"] == stats["tau"] == 1, "nothing is ever drawn"
    assert generate(growth=Stopped(Static([2, 1]), Unsure(0.0)), max_new_tokens=12).stats["nodes_per_step"] == 5


def test_what_is_no_stop_rule_is_refused() -> None:
    rule: Any = Unsure
    with pytest.raises(TypeError, match=r"rule must be a rule such as Confidence\(0.4\), got <class"):
        Stopped(Chain(2), rule)
    with pytest.raises(ValueError, match="Stopped needs a growth of layers, got DySpec"):
        Stopped(stree.growth.DySpec(form="heap"), Unsure()).plan(4)


@dataclass(frozen=True)
class Wrong(Drafter):
    """Drafts a child of the root with one fault."""

    fault: str
    uses_growth = False

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        return WrongRun(self.fault, vocab_size)


class WrongRun(DraftRun):
    def __init__(self, fault: str, vocab: int) -> None:
        self.fault, self.vocab = fault, vocab

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        tree = TokenTree.chain(torch.stack([pending, torch.full_like(pending, 99 if self.fault == "token" else 1)], 1))
        stated = torch.full((len(pending), 1, self.vocab), torch.nan if self.fault == "probs" else 1 / self.vocab)
        kind = torch.full(tree.parents.shape, 7 if self.fault == "kind" else SAMPLED, dtype=torch.int8)
        probs = DraftProbs(stated, torch.zeros_like(tree.parents), kind)
        return Draft(tree, probs, max_depth=0 if self.fault == "depth" else 1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("token", r"tokens in \[0, 5\), got 99 to 99"),
        ("depth", "trees no deeper than max_depth, 0, got a node at depth 1"),
        ("kind", "probs.kind SAMPLED, DELTA or INDEPENDENT, got .*7"),
        ("probs", "probs.probs of at least 0, got nan"),
    ],
)
def test_a_drafter_that_returns_what_it_may_not_is_named_and_done_without(
    fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREE_DEBUG", "1")
    with pytest.raises(stree.GenerationError, match=f"WrongRun.propose must return {message}") as caught:
        generate(Wrong(fault), growth=None, budget=3)
    assert [len(text) for text in caught.value.output.sequences] == [32, 31]
