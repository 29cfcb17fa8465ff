"""Verdicts: what is wrong is called wrong and not timed, what is right passes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_pairs import tiny_pair
from torch import Tensor

import stree
from stree.bench import lossless
from stree.bench.execute import Case, Run, execute
from stree.bench.lossless import check_method, compare, judge, probs_test
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.unrolled import UnrolledLM, UnrolledState
from stree.sampling import Random, Sampling

PAIR = tiny_pair()
PROMPT = tuple(range(5, 18))
GREEDY, SAMPLED = Case((PROMPT,), 8, 0.0), Case((PROMPT,), 12, 1.0)


def method(name: str) -> Method:
    (found,) = parse_methods(name)
    return found


class _RootLogits(UnrolledLM):
    """A control: every node has the logits of the root."""

    def verify(self, state: UnrolledState, tree: stree.TokenTree) -> Tensor:  # type: ignore[override]
        logits = super().verify(state, tree)
        return logits[:, :1].expand_as(logits)


@pytest.mark.slow
def test_a_method_that_is_wrong_fails_with_the_logit_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.bench.execute.UnrolledLM", _RootLogits)
    for case in (GREEDY, SAMPLED):
        found = check_method(PAIR, method("unrolled:static:2,2"), [case], 0)
        assert (found["status"], found["lossless"], found["identical"]) == ("failed", False, False)
        assert abs(found["logit_gap"]) > 1e-3 * found["logit_scale"]
    assert check_method(PAIR, method("unrolled:dyspec:6@match"), [SAMPLED], 0)["status"] == "failed"


@pytest.mark.parametrize("name", slow_unless("suffix".__eq__, ["dyspec:6@match", "suffix"]))
def test_under_match_a_method_must_give_the_text_of_plain_sampling(name: str) -> None:
    found = check_method(PAIR, method(name), [SAMPLED], 0)
    assert (found["status"], found["verifier"], found["identical"]) == ("ok", "match", True)
    run, other = execute(PAIR, method(name), SAMPLED), execute(PAIR, method("plain"), replace(SAMPLED, seed=1))
    assert judge(PAIR, method(name), SAMPLED, run, {})["lossless"]
    assert judge(PAIR, method(name), SAMPLED, run, {"plain": other})["lossless"] is False


@pytest.mark.slow
def test_without_the_statistical_test_a_rejection_sampler_is_not_called_lossless() -> None:
    found = check_method(PAIR, method("dyspec:6"), [SAMPLED], 0)
    assert (found["status"], found["lossless"], found["verifier"]) == ("ok", None, "auto")
    assert found["greedy_identical"]  # but it is known to be right when greedy


@pytest.mark.parametrize("name", ["plain", "dyspec:6"])
def test_sampled_text_passes_the_test_of_its_distribution(name: str) -> None:
    found = probs_test(PAIR, method(name), SAMPLED, 12)
    assert found["lossless"] and found["num_tokens"] == 12 * 11


@pytest.mark.slow
def test_sampled_text_of_another_distribution_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def colder(pair: Pair, one: Method, case: Case) -> Run:
        return execute(pair, one, replace(case, temperature=0.7 * case.temperature))

    monkeypatch.setattr(lossless, "execute", colder)
    found = check_method(PAIR, method("dyspec:6"), [SAMPLED], 24)
    assert found["status"] == "failed" and found["p_value"] < 1e-4


@pytest.mark.parametrize("kept", slow_unless({"top_k": 3}.__eq__, [{"top_k": 3}, {"top_p": 0.3}]))
def test_text_of_the_most_probable_tokens_is_sampled_and_tested_as_such(
    kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(SAMPLED, **kept)
    assert probs_test(PAIR, method("dyspec:6"), case, 6)["lossless"]
    assert check_method(PAIR, method("suffix"), [case], 0)["identical"]
    tokens = execute(PAIR, method("transformers"), case).tokens[0]
    logits = PAIR.plain_logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    assert (case.sampling.probs(logits.double()).gather(1, torch.tensor(tokens)[:, None]) > 0).all()
    monkeypatch.setattr(lossless, "execute", lambda pair, one, case: execute(pair, one, SAMPLED))
    assert not probs_test(PAIR, method("dyspec:6"), case, 6)["lossless"], "text of all tokens"


@pytest.mark.parametrize("name", ["transformers", "lossy-target-init:2,2"])
def test_other_libraries_and_lossy_methods_are_not_judged_when_sampling(name: str) -> None:
    found = check_method(PAIR, method(name), [SAMPLED], 2)
    assert found["status"] == "ok" and found["lossless"] is None and "greedy_identical" not in found


def test_a_difference_at_a_near_tie_is_lossless_and_its_place_is_reported() -> None:
    logits = PAIR.plain_logits(PROMPT)[-1]
    first, second = logits.topk(2).indices.tolist()
    wanted, other = [first, 5, 6], [second, 5, 6]
    apart = compare(PAIR, GREEDY, 0, other, wanted)
    assert not apart["lossless"] and apart["first_divergence"] == 0
    assert apart["logit_gap"] == pytest.approx(float(logits[first] - logits[second]))
    near = logits.clone()
    near[second] = near[first] - 1e-12
    found = compare(_with_logits(near), GREEDY, 0, other, wanted)
    assert found["lossless"] and not found["identical"]
    assert compare(PAIR, GREEDY, 0, [first], wanted) == {"lossless": False, "identical": False, "lengths": [1, 3]}
    shorter = Case((PROMPT[:-1],), 8, 0.0)
    later = compare(PAIR, shorter, 0, [PROMPT[-1], *wanted], [PROMPT[-1], *other])  # here the reference is the worse
    assert not later["lossless"] and later["first_divergence"] == 1


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(("apart_by", "is_near"), [(1e-12, True), (0.02, False)])
def test_sampled_texts_may_part_where_the_random_number_is_at_the_border_of_two_tokens(
    row: int, apart_by: float, is_near: bool
) -> None:
    case = Case((PROMPT, PROMPT), 2, 0.7, seed=3)
    rng = Random(case.seed, torch.tensor([row]), torch.tensor([len(PROMPT)]))
    border = rng.uniform("target", torch.tensor([0])) + apart_by
    logits = case.temperature * torch.tensor([border, 1 - border, 0.0], dtype=torch.float64).log().clamp(min=-1e3)
    assert rng.choice("target", Sampling(case.temperature).probs(logits[None]), torch.tensor([0])).item() == 0
    for tokens, wanted in (([1, 5], [0, 5]), ([0, 5], [1, 5])):
        found = compare(_with_logits(logits), case, row, tokens, wanted)
        assert found["lossless"] == is_near and found["logit_gap"] == pytest.approx(4 * 0.7 * apart_by, rel=1e-3)
    unlikely = compare(_with_logits(logits), case, row, [2, 5], [0, 5])
    assert not unlikely["lossless"], "a token of probability 0"


def test_the_gap_of_sampled_tokens_is_measured_from_the_random_number_that_drew_them() -> None:
    case = Case((PROMPT, PROMPT[2:]), 12, 0.8, seed=5)
    drawn = 0
    for row, tokens in enumerate(execute(PAIR, method("plain"), case).tokens):
        for place, token in enumerate(tokens):
            probs = (PAIR.plain_logits([*case.prompts[row], *tokens[:place]])[-1].double() / 0.8).softmax(-1)
            others = [other for other in (token - 1, token + 1) if 0 <= other < len(probs)]
            gaps = [
                compare(PAIR, case, row, [*tokens[:place], other], tokens[: place + 1])["logit_gap"] for other in others
            ]
            assert len(others) == 1 or min(gaps) <= 4 * 0.8 * float(probs[token]) / 2 + 1e-6, "one border is near"
            drawn += len(others) == 2
    assert drawn > 12


def _with_logits(logits: Tensor) -> Any:
    """Make a pair whose plain logits are the same after every text."""
    return SimpleNamespace(target=PAIR.target, plain_logits=lambda tokens: logits[None])


def test_a_right_output_of_a_rule_of_another_author_is_claimed_to_be_lossless() -> None:
    run = execute(PAIR, method("chain:2"), GREEDY)
    own = replace(run, stats={**run.stats, "lossless": "claimed"})
    assert judge(PAIR, method("chain:2"), GREEDY, run, {})["lossless"] is True
    assert judge(PAIR, method("chain:2"), GREEDY, own, {})["lossless"] == "claimed"
    wrong = replace(own, tokens=[[(own.tokens[0][0] + 1) % 8, *own.tokens[0][1:]]])
    assert judge(PAIR, method("chain:2"), GREEDY, wrong, {})["lossless"] is False
