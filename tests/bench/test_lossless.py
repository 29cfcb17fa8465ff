"""Verdicts: what is wrong is called wrong and not timed, what is right passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stree.bench.check import check_method, judge
from stree.bench.verdict import compare, divergence, law_test
from stree.bench.watch import Counts
from helpers.tiny_pairs import tiny_pair
from torch import Tensor

import stree
from stree.bench import check, verdict
from stree.bench.baselines import BaselineState, UnrolledLM
from stree.bench.execute import Case, Run, execute
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.sampling import Sampling

PAIR = tiny_pair()
PROMPT = tuple(range(5, 18))
GREEDY, SAMPLED = Case((PROMPT,), 8, 0.0), Case((PROMPT,), 12, 1.0)


def method(name: str) -> Method:
    (found,) = parse_methods(name)
    return found


@pytest.mark.parametrize("name", ["plain", "transformers", "chain:2", "dyspec:6", "suffix", "unrolled:dyspec:6"])
def test_a_greedy_method_passes_by_token_identity(name: str) -> None:
    found = check_method(PAIR, method(name), [GREEDY], 0)
    assert (found["status"], found["lossless"], found["identical"]) == ("ok", True, True)


class _Deaf(UnrolledLM):
    """A control: every node has the logits of the root."""

    def verify(self, state: BaselineState, tree: stree.TokenTree) -> Tensor:
        logits = super().verify(state, tree)
        return logits[:, :1].expand_as(logits)


def test_a_greedy_method_that_is_wrong_fails_with_the_logit_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.bench.execute.UnrolledLM", _Deaf)
    found = check_method(PAIR, method("unrolled:static:2,2"), [GREEDY], 0)
    assert (found["status"], found["lossless"], found["identical"]) == ("failed", False, False)
    assert abs(found["logit_gap"]) > 1e-3 * found["logit_scale"]


def test_a_coupled_method_must_give_the_text_of_plain_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check_method(PAIR, method("dyspec:6@match"), [SAMPLED], 0)
    assert (right["status"], right["verifier"], right["identical"]) == ("ok", "match", True)
    monkeypatch.setattr("stree.bench.execute.UnrolledLM", _Deaf)
    assert check_method(PAIR, method("unrolled:dyspec:6@match"), [SAMPLED], 0)["status"] == "failed"


@pytest.mark.parametrize("name", ["plain", "chain:2", "dyspec:6", "suffix"])
def test_sampled_text_passes_the_test_of_its_law(name: str) -> None:
    found = law_test(PAIR, method(name), SAMPLED, 12)
    assert found["lossless"] and found["num_tokens"] == 12 * 11


def _hot(pair: Pair, one: Method, case: Case) -> Run:
    """A control: text of a lower temperature than is asked for."""
    return execute(pair, one, Case(case.prompts, case.new_tokens, 0.7 * case.temperature, case.seed))


def test_sampled_text_of_another_law_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "execute", _hot)
    found = law_test(PAIR, method("plain"), SAMPLED, 24)
    assert not found["lossless"] and found["p_value"] < 1e-4
    monkeypatch.setattr(check, "execute", _hot)
    found = check_method(PAIR, method("dyspec:6"), [SAMPLED], 24)
    assert found["status"] == "failed" and found["p_value"] < 1e-4


def test_without_the_test_a_rejection_sampler_is_not_called_lossless() -> None:
    found = check_method(PAIR, method("dyspec:6"), [SAMPLED], 0)
    assert (found["status"], found["lossless"], found["verifier"]) == ("ok", None, "auto")
    assert found["greedy_twin"]  # but it is known to be right when greedy


def test_a_rejection_sampler_that_is_wrong_when_greedy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.bench.execute.UnrolledLM", _Deaf)
    found = check_method(PAIR, method("unrolled:static:2,2"), [SAMPLED], 0)
    assert found["status"] == "failed" and "logit_gap" in found


def test_a_difference_at_a_near_tie_is_lossless_and_says_where() -> None:
    logits = PAIR.plain_logits(PROMPT)[-1]
    first, second = logits.topk(2).indices.tolist()
    wanted, other = [first, 5, 6], [second, 5, 6]
    apart = compare(PAIR, PROMPT, other, wanted)
    assert not apart["lossless"] and apart["first_divergence"] == 0
    assert apart["logit_gap"] == pytest.approx(float(logits[first] - logits[second]))

    class Tied:
        target = PAIR.target

        def plain_logits(self, tokens: Any) -> Tensor:
            tied = logits.clone()
            tied[second] = tied[first] - 1e-12
            return tied[None]

    found = compare(Tied(), PROMPT, other, wanted)  # type: ignore[arg-type]
    assert found["lossless"] and not found["identical"]
    assert compare(PAIR, PROMPT, [first], wanted) == {"lossless": False, "identical": False, "lengths": [1, 3]}
    later = compare(PAIR, PROMPT[:-1], [PROMPT[-1], *wanted], [PROMPT[-1], *other])  # here the reference is the worse
    assert not later["lossless"] and later["first_divergence"] == 1
    assert later["logit_gap"] == pytest.approx(-apart["logit_gap"])
    assert later["logit_scale"] == pytest.approx(float(logits.abs().max()))


def test_a_timed_output_that_differs_in_one_repeat_fails() -> None:
    plain, chain = method("plain"), method("chain:2")
    runs = [execute(PAIR, chain, Case((PROMPT,), 8, 0.0, seed)) for seed in (0, 1)]
    others = {"plain": [execute(PAIR, plain, GREEDY)] * 2, "chain:2": runs}
    assert judge(PAIR, chain, GREEDY, runs, others)["lossless"]
    wrong = [runs[0].tokens[0][:-1] + [(runs[0].tokens[0][-1] + 1) % 97]]
    second = Run(wrong, 1.0, None, runs[1].stats, runs[1].counts, None, None)
    found = judge(PAIR, chain, GREEDY, [runs[0], second], others)
    assert found["lossless"] is False and found["first_divergence"] == 7


def test_a_method_that_is_wrong_in_the_first_of_its_cases_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_when_greedy(pair: Pair, one: Method, case: Case) -> Run:
        run = execute(pair, one, case)
        return run if case.temperature else replace(run, tokens=[[*run.tokens[0][:-1], run.tokens[0][-1] ^ 1]])

    monkeypatch.setattr(check, "execute", wrong_when_greedy)
    found = check_method(PAIR, method("dyspec:6@match"), [GREEDY, SAMPLED], 0)
    assert (found["status"], found["verifier"], found["first_divergence"]) == ("failed", "greedy", 7)


@pytest.mark.parametrize("name", ["transformers", "lossy-target-init:2,2"])
def test_what_is_not_bound_to_the_target_s_sampled_law_is_not_judged(name: str) -> None:
    one = method(name)
    found = check_method(PAIR, one, [SAMPLED], 2)
    assert found["status"] == "ok" and found["lossless"] is None and "greedy_twin" not in found
    runs = [execute(PAIR, one, SAMPLED)]
    timed = judge(PAIR, one, SAMPLED, runs, {"plain": [execute(PAIR, method("plain"), replace(SAMPLED, seed=1))]})
    assert timed == {"verifier": found["verifier"], "lossless": None}


def test_of_a_batch_the_worst_row_is_reported_each_held_to_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    same, tie, wrong = (
        {"lossless": is_lossless, "identical": is_identical}
        for is_lossless, is_identical in ((True, True), (True, False), (False, False))
    )
    for rows, worst in (((same, tie, wrong), wrong), ((same, tie, same), tie), ((same, same), same)):
        for order in permutations(rows):
            case, found = Case((PROMPT,) * len(order), 1, 0.0), iter(order)

            def compared(_: Pair, __: Any, tokens: list[int], wanted: list[int], found: Any = found) -> Any:
                assert tokens == wanted
                return next(found)

            monkeypatch.setattr(check, "compare", compared)
            texts = [[number] for number in range(len(order))]
            assert check._greedy(PAIR, case, texts, texts) == worst


def test_batches_are_compared_with_plain_decoding_and_that_with_each_prompt_alone() -> None:
    others: dict[str, list[Run]] = {"transformers": [], "plain": []}
    alone, batch, sampled = GREEDY, replace(GREEDY, prompts=(PROMPT, PROMPT)), SAMPLED
    for name in ("plain", "transformers", "chain:2"):
        is_plain = name != "chain:2"
        assert check._reference(method(name), alone, others) is others["transformers"]
        assert check._reference(method(name), batch, others) is (None if is_plain else others["plain"])
        assert check._reference(method(name), sampled, others) is others["plain"]
        assert check._reference(method(name), sampled, {}) is None


def test_every_repeat_of_a_coupled_method_is_compared_with_the_text_of_its_own_seed() -> None:
    one, cases = method("dyspec:6@match"), [replace(SAMPLED, seed=seed) for seed in (0, 1)]
    runs, plain = ([execute(PAIR, way, case) for case in cases] for way in (one, method("plain")))
    assert runs[0].tokens != runs[1].tokens
    for others in ({}, {"plain": plain}):
        assert judge(PAIR, one, SAMPLED, runs, others)["lossless"]
        assert judge(PAIR, one, SAMPLED, [runs[1], runs[1]], others)["lossless"] is False, "though the second is right"


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_divergence_is_that_of_the_two_laws(temperature: float) -> None:
    case, heat = replace(SAMPLED, temperature=temperature), temperature or 1.0
    run = execute(PAIR, method("plain"), case)
    found = divergence(PAIR, case, run.tokens)
    assert PAIR.drafter is not None
    bits, apart = 0.0, 0.0
    for place in range(12):  # one token after the other, from texts of their own
        text = [*PROMPT, *run.tokens[0][:place]]
        with torch.no_grad():
            models = PAIR.plain, PAIR.drafter.model
            laws = [(model(torch.tensor([text])).logits[0, -1] / heat).softmax(-1) for model in models]
        p, q = (law.tolist() for law in laws)
        bits += sum(a * torch.tensor(a / b).log2().item() for a, b in zip(p, q, strict=True)) / 12
        apart += sum(max(a - b, 0.0) for a, b in zip(p, q, strict=True)) / 12
    assert found == pytest.approx({"kl_bits": bits, "total_variation": apart}, rel=1e-4)
    assert 0.01 < found["total_variation"] < 0.9


def test_the_divergence_of_laws_that_share_no_token_is_a_number() -> None:
    cold = replace(SAMPLED, temperature=1e-4)  # all but one of the chances are 0
    found = divergence(PAIR, cold, execute(PAIR, method("plain"), cold).tokens)
    assert 1 < found["kl_bits"] < 2000 and 0 < found["total_variation"] <= 1


def test_counts_follow_the_accepted_path_through_the_siblings() -> None:
    counts = Counts()
    #        0
    #      / | \        node 2 is accepted, then its second child 5; 5 has a child that is rejected
    #     1  2  3
    #       / \
    #      4   5 - 6
    counts.add([-1, 0, 0, 0, 2, 2, 5, -1], [0, 2, 5])
    assert counts.drafted == 6
    assert counts.tested == Counter({0: 3, 1: 2}) and counts.accepted == Counter({1: 2})
    assert counts.reached == Counter({0: 1, 1: 1, 2: 1})


def test_a_watched_run_counts_what_the_library_counts() -> None:
    run = execute(PAIR, method("static:3,2"), Case((PROMPT, PROMPT[:5]), 9, 0.8))
    steps = run.counts.reached[0]
    accepted = sum(run.counts.reached.values()) - steps
    assert run.stats["tau"] == pytest.approx(1 + accepted / steps)
    by_depth = [run.counts.reached[d + 1] / run.counts.reached[d] for d in range(len(run.stats["acceptance_by_depth"]))]
    assert run.stats["acceptance_by_depth"] == pytest.approx(by_depth)
    assert sum(run.counts.accepted.values()) == accepted
    assert run.counts.drafted <= 9 * steps and run.counts.has_laws


def test_the_law_of_places_is_uniform_for_the_law_itself() -> None:
    sampling = Sampling(1.0)
    law = sampling.law(PAIR.plain_logits(PROMPT)[-1].double())
    rng = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(law, 4000, replacement=True, generator=rng).tolist()
    case = Case((PROMPT,), 1, 1.0)
    noise = np.random.default_rng(0)
    places = [verdict.places_in_law(PAIR, case, [[token]], noise)[0] for token in tokens[:400]]
    assert abs(np.mean(places) - 0.5) < 5 * (1 / 12 / 400) ** 0.5


def test_a_place_is_the_mass_of_all_likelier_tokens_and_a_share_of_its_own() -> None:
    case, outputs = Case((PROMPT, PROMPT[:4]), 2, 0.5), [[3, 80], [11, 5]]
    noise: Any = SimpleNamespace(random=lambda n: np.array([0.25, 0.75]))
    places = []
    for prompt, tokens in zip(case.prompts, outputs, strict=True):
        for number, token in enumerate(tokens):
            law = (PAIR.plain_logits([*prompt, *tokens[:number]])[-1].double() / 0.5).softmax(-1)
            places.append(float(law[law > law[token]].sum() + (0.25 + 0.5 * number) * law[token]))
    assert verdict.places_in_law(PAIR, case, outputs, noise) == pytest.approx(places)
