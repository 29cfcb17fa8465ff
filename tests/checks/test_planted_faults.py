"""The checks for authors find one planted fault of each kind, and say where it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from helpers.random_rows import random_rows
from torch import Tensor

from stree.drafters import Draft, Drafter, DraftRun, NoDrafter
from stree.growth import AcceptanceModel, Chain, DecisionStop, DepthStop, DySpec, Growth, Plan, Slots
from stree.growth.acceptance_model import PathProbability
from stree.sampling import AnySampling, Random, Sampling
from stree.testing import CheckFailed, TableModel, check_drafter, check_growth, check_verifier
from stree.testing.drafting import UNIFORM
from stree.tree import TokenTree
from stree.verify import INDEPENDENT, SAMPLED, VERIFIERS, Acceptance, DraftProbs, Verifier, accept


@dataclass(frozen=True)
class TableDrafter(Drafter):
    """Draws two children of the root from a table, with one fault or none."""

    fault: str = "none"
    uses_growth = False

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        return TableRun(TableModel.random(vocab_size, 5).logits, self.fault, rng, [len(prompt) for prompt in prompts])


class TableRun(DraftRun):
    def __init__(self, logits: Tensor, fault: str, rng: Random, lengths: list[int]) -> None:
        self.logits, self.fault, self.rng, self.lengths = logits, fault, rng, torch.tensor(lengths)

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        stated = self.logits[pending].softmax(-1)
        drawn = (2 * self.logits[pending]).softmax(-1) if self.fault == "another distribution" else stated
        rng = self.rng if self.fault == "numbers of the first step" else self.rng.at(self.lengths)
        zero, tokens = torch.zeros_like(pending), [pending]
        for node in range(2):
            tokens.append(rng.choice("target" if self.fault == "numbers of the target" else "draft", drawn, zero, node))
            if self.fault != "with replacement":
                drawn = drawn.scatter(1, tokens[-1][:, None], 0.0)
        parents = torch.tensor([[-1, 0, 0]], dtype=torch.int32).repeat(len(pending), 1)
        if self.fault == "numbers of torch":
            tokens[1:] = stated.multinomial(2, generator=torch.Generator().manual_seed(0)).unbind(1)
        row, kind = torch.zeros_like(parents), torch.full_like(parents, SAMPLED, dtype=torch.int8)
        tree = TokenTree(torch.stack(tokens, 1), parents)
        depth = 0 if self.fault == "depth" else 1
        return Draft(tree, DraftProbs(stated[:, None], row, kind), depth)

    def observe(self, acceptance: Acceptance) -> None:
        self.lengths = self.lengths + acceptance.path_lengths


DRAFTER_FAULTS = {
    "another distribution": r"is not drawn from the distribution that is stated:\n +token +drawn +stated\n",
    "with replacement": r"behind the siblings \[\d\], is not drawn",
    "numbers of the first step": r"second step, .* accepted\):\nthe child below the path \[1\]",
    "numbers of torch": "is not drawn from the distribution that is stated",
    "numbers of the target": "numbers must be drawn for 'draft', got 'target', which are numbers of another part",
    "depth": "must return trees no deeper than max_depth, 0, got a node at depth 1",
}


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_drafter_that_states_what_it_did_not_draw_is_found(fault: str) -> None:
    with pytest.raises(CheckFailed, match=DRAFTER_FAULTS[fault]):
        check_drafter(TableDrafter(fault), vocab_size=3, budget=3)


def test_the_same_drafter_without_a_fault_passes() -> None:
    report = check_drafter(TableDrafter(), vocab_size=3, budget=3)
    assert report.cases > 20 and report.worst < 1e-12 and not report.notes


class PairDrafter(Drafter):
    """Draws a child from the counts of pairs in the prompt, and states an average with the uniform distribution."""

    uses_growth = False

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        counts = torch.full((vocab_size, vocab_size), 0.1)
        for pair in zip(prompts[0], prompts[0][1:], strict=False):
            counts[pair] += 1
        return PairRun(counts, "none", rng, [len(prompt) for prompt in prompts])


class PairRun(TableRun):
    row = 0

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        drawn = self.logits[pending] / self.logits[pending].sum(1, keepdim=True)
        token = self.rng.at(self.lengths).choice("draft", drawn, torch.zeros_like(pending), 0)
        tree = TokenTree.chain(torch.stack([pending, token], 1))
        row = torch.where(tree.parents < 0, 0, self.row).int()
        kind = torch.full_like(row, SAMPLED, dtype=torch.int8)
        return Draft(tree, DraftProbs((drawn[:, None] + 1 / 3) / 2, row, kind), 1)


def test_a_drafter_that_reads_its_prompt_is_checked_behind_a_prompt_of_several_tokens() -> None:
    with pytest.raises(CheckFailed, match=r"prompt \[0, 1, 2, 0, 1, 1\].*\n.*not drawn from the distribution"):
        check_drafter(PairDrafter(), vocab_size=3, budget=2, seeds=[0])
    report = check_drafter(PairDrafter(), vocab_size=3, budget=2, seeds=[0], prompts=[[0]])
    assert report.notes == (UNIFORM,)


def test_a_row_beyond_the_stored_distributions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairRun, "row", 3)
    with pytest.raises(CheckFailed, match=r"must return probs.row in \[0, 1\) for 1 distributions, got \[0, 3\]"):
        check_drafter(PairDrafter(), vocab_size=3, budget=2)
    draft = PairDrafter().start(3, [[0]], random_rows(1)).propose(torch.tensor([0]), None, 2)
    with pytest.raises(ValueError, match=r"draft.row must be in \[0, 1\) for 1 rows of probs, got \[3\]"):
        accept(draft.tree, torch.zeros(1, 2, 3), Sampling(1.0), random_rows(1), draft.probs)


@dataclass(frozen=True)
class OwnToken(DySpec):
    """Its priority is the probability of the slot's own token."""

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        return PathProbability()


@dataclass(frozen=True)
class DropsSiblings(DySpec):
    """Prunes the finished tree by the values of its nodes, and so drops siblings that were drawn."""

    def plan(self, budget: int) -> Plan:
        return replace(super().plan(budget + 2), num_nodes=budget - 1, is_pruned=True)


class LikelyOnly(PathProbability):
    """Gives no slot to a child whose own token is unlikely."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        priority, value = super().rate(slots)
        return priority * (slots.probs > 0.3), value


@dataclass(frozen=True)
class DropsUnlikely(DySpec):
    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        return LikelyOnly()


@pytest.mark.parametrize(
    "growth",
    [
        OwnToken(depth=2, ranks=1, threshold=0.3),
        DropsUnlikely(depth=1, ranks=2),
    ],
    ids=["priority by own token", "unlikely sibling"],
)
def test_a_growth_that_chooses_by_drawn_tokens_is_found(growth: Growth) -> None:
    with pytest.raises(CheckFailed, match=rf"growth {type(growth).__name__} is not lossless \(budget .*\):\nthe child"):
        check_growth(growth, seeds=(0,))
    assert check_growth(DySpec(depth=2, ranks=1, threshold=0.3), budget=3, seeds=(0,)).cases > 10


class Logarithms(PathProbability):
    """Rates by logarithms, as EAGLE's code does."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        _, value = super().rate(slots)
        return value.log(), value.log()


class Nothing(PathProbability):
    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        _, value = super().rate(slots)
        return 0 * value, value


@dataclass(frozen=True)
class RatedBy(DySpec):
    model: type[AcceptanceModel] = Nothing

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        return self.model()


class Silent(TableDrafter):
    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        return NoDrafter().start(vocab_size, prompts, rng)


def test_what_never_drafts_or_drops_what_was_drawn_is_refused() -> None:
    with pytest.raises(CheckFailed, match="growth RatedBy drafts nothing below any root"):
        check_growth(RatedBy(), budget=2, seeds=(0,))
    with pytest.raises(ValueError, match=r"Logarithms.rate must return priorities of at least 0, .*, got -"):
        check_growth(RatedBy(model=Logarithms), budget=2, seeds=(0,))
    with pytest.raises(ValueError, match=r"is pruned, and its children are drawn \(drawing='distinct'\)"):
        check_growth(DropsSiblings(depth=2, ranks=2, threshold=0.0), seeds=(0,))
    with pytest.raises(CheckFailed, match="drafter Silent drafts nothing below any root"):
        check_drafter(Silent(), vocab_size=3, budget=2)


@pytest.mark.parametrize("growth", [DepthStop(Chain(2), math.log(0.3), layers=None), DecisionStop(Chain(2), 0.3)])
def test_rules_that_stop_chains_by_what_was_drawn_pass(growth: Growth) -> None:
    """Trees of a batch whose rows have all stopped have no padding: the check must not tell these apart."""
    assert check_growth(growth, budget=3, seeds=(0,)).notes == ()


class Eager:
    """Random numbers that let tests pass more often."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.choice = rng, rng.choice

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        return self.rng.bernoulli(purpose, (1.1 * probs).clamp(max=1), offset, node)


class Wrong(Verifier):
    """Recursive rejection with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        if self.fault == "accepts too often":
            rng = cast(Random, Eager(rng))
        if draft is not None and self.fault == "no mask of earlier siblings":
            draft = replace(draft, kind=draft.kind.masked_fill(draft.kind == SAMPLED, INDEPENDENT))
        accepted = accept(tree, target_logits, sampling, rng, draft, "rejection", max_depth)
        if self.fault == "argmax of the last node":
            last = accepted.path.gather(1, accepted.num_accepted[:, None].long())[:, :, None].long()
            logits = target_logits.take_along_dim(last, 1)[:, 0]
            return replace(accepted, next_token=logits.argmax(-1))
        if self.fault == "no path":
            return replace(accepted, path=accepted.path.flip(1))
        return accepted


class Greedy(Wrong):
    """Refuses to sample, and is right otherwise."""

    def check(self, sampling: Sampling) -> None:
        if not sampling.is_greedy:
            raise ValueError(f"Greedy takes temperature 0, got {sampling.temperature}")


FAULTS = {
    "accepts too often": r"verifier Wrong is not lossless \(chain .*\): total variation .*\n +text +emitted +target\n",
    "no mask of earlier siblings": r"verifier Wrong is not lossless \(siblings \[-1, 0, 0, 0\], sampled",
    "argmax of the last node": "verifier Wrong is not lossless",
    "no path": "path must lead from the root down, got",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_verifier_is_found(fault: str) -> None:
    with pytest.raises(CheckFailed, match=FAULTS[fault]):
        check_verifier(Wrong(fault), seeds=(0,))


def test_a_verifier_is_checked_for_the_sampling_that_it_takes() -> None:
    report = check_verifier(Greedy("none"), seeds=(0,))
    assert report.cases == 2 and "Greedy takes temperature 0" in str(report)


def test_a_rule_that_draws_numbers_itself_is_told_how() -> None:
    class Uniform(Wrong):
        def __call__(
            self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
            max_depth: int,
        ) -> Acceptance:  # fmt: skip
            rng.uniform("accept", tree.depths)
            return super().__call__(tree, target_logits, sampling, rng, draft, max_depth)

    with pytest.raises(AssertionError, match=r"accept numbers must be drawn by rng.choice or rng.bernoulli"):
        check_verifier(Uniform("none"), seeds=(0,))


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_verifier_of_the_registry_is_lossless(name: str) -> None:
    assert check_verifier(name, seeds=(0,)).worst < 1e-12


def test_a_verifier_that_is_entered_in_the_registry_is_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "mine", Wrong("accepts too often"))
    with pytest.raises(CheckFailed, match="verifier mine is not lossless"):
        test_every_verifier_of_the_registry_is_lossless("mine")
