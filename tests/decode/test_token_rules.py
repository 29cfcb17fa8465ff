"""Bias, penalties, allowed and forbidden tokens: each node as a loop over its own text has it, each text transformers'.

Run: python -m pytest tests/decode/test_token_rules.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.captured import captured, launched, near_drafter
from helpers.fast_cases import slow_unless
from helpers.tiny_models import VOCAB, path_to, random_texts, random_tree, real_nodes, right_padded, tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

import stree
from stree import Sampling, TokenTree
from stree.decode.batch_token_rules import BatchTokenRules
from stree.decode.token_rules import TokenRules
from stree.drafters import FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated

STOPS = frozenset({1, 5})
RULES: list[dict[str, Any]] = [
    {
        "logit_bias": {3: 2.5, 7: -1.25}, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7,
        "bad_words": [[4], [2, 3], [0, 1, 2]], "min_new_tokens": 7,
    },
    {"repetition_penalty": 0.8, "presence_penalty": -1.5, "bad_words": [[6, 6]], "allowed_token_ids": [*range(8)]},
    {},
]  # fmt: skip


def of_text(text: list[int], prompt_length: int, options: dict[str, Any], logits: Tensor) -> Tensor:
    """Apply rules to float[vocab] logits of what follows one text, token by token."""
    out, new = logits.clone(), text[prompt_length:]
    for token, bias in options.get("logit_bias", {}).items():
        out[token] += bias
    for token in set(text):
        penalty = options.get("repetition_penalty", 1.0)
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    for token in set(new):
        out[token] -= options.get("frequency_penalty", 0.0) * new.count(token) + options.get("presence_penalty", 0.0)
    for token in range(len(out)):
        if token not in options.get("allowed_token_ids", range(len(out))):
            out[token] = -torch.inf
    for word in options.get("bad_words", []):
        if text[len(text) - len(word) + 1 :] == word[:-1]:
            out[word[-1]] = -torch.inf
    if len(new) < options.get("min_new_tokens", 0):
        out[[*STOPS]] = -torch.inf
    return out


def batch_rules(prompt_lengths: Sequence[int], vocab: int) -> BatchTokenRules:
    """Begin a row for each of the first rules; a row that had others before holds nothing of them."""
    rules = BatchTokenRules(len(prompt_lengths), vocab, torch.device("cpu"))
    for options in (RULES[0], None):
        for row in range(len(prompt_lengths)):
            rules.end(row)
        assert not rules.parts, "what no running sequence needs is not computed"
        for row, (own, length) in enumerate(zip(RULES, prompt_lengths, strict=False)):
            rules.begin(row, TokenRules.of(vocab, STOPS, 20, **(options or own)), length)
    assert rules.parts == {"bias", "repetition", "counts", "words", "minimum"}
    return rules


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_node_has_the_counts_and_endings_of_its_own_text(dtype: torch.dtype) -> None:
    rng, vocab, tolerance = random.Random(5), 10, 1e-12 if dtype == torch.float64 else 0.05
    wrong = 0
    for first in (0, 1, 4):
        texts = [[rng.randrange(vocab) for _ in range(length)] for length in (6, 9, 4)]
        prompts, tree = [3, 9, 1], random_tree(rng, [11, 7, 12], 12)
        tree = TokenTree(torch.where(tree.is_padding, 0, tree.tokens % 4), tree.parents)  # tokens that often recur
        tokens, lengths = right_padded(texts)
        logits = torch.randn(3, 12 - first, vocab, dtype=torch.float64).to(dtype)
        rules, before = batch_rules(prompts, vocab), logits.clone()
        found = rules(torch.cat([tokens, torch.full((3, 4), 2)], 1), lengths, tree, logits)
        alone = replace_mask(tree, torch.eye(12, dtype=torch.bool).expand(3, 12, 12))
        control = rules(tokens, lengths, alone, logits)
        for row, text in enumerate(texts):
            for node in (one for one in real_nodes(tree, row) if one >= first):
                whole = [*text, *tree.tokens[row, path_to(tree, row, node)].tolist()]
                expected = of_text(whole, prompts[row], RULES[row], logits[row, node - first].double())
                own = found[row, node - first].double()
                torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)
                wrong += not torch.allclose(control[row, node - first].double(), expected, tolerance, tolerance)
        assert torch.equal(logits, before) and torch.equal(found[2], logits[2])
    assert wrong > 10, "without ancestors many nodes differ"


def replace_mask(tree: TokenTree, mask: Tensor) -> TokenTree:
    """Return a tree of the same depths whose nodes have other ancestors."""
    return TokenTree.unchecked(tree.tokens, tree.parents, tree.depths, mask)


def test_first_tokens_follow_the_rules_of_their_rows() -> None:
    texts = random_texts(random.Random(2), [6, 4, 5])
    tokens, lengths = right_padded(texts)
    rules, rows, logits = batch_rules([6, 4, 5], VOCAB), torch.tensor([1, 0]), torch.randn(2, VOCAB)
    found = rules.first(tokens, rows, lengths[rows], logits)
    for place, row in enumerate(rows.tolist()):
        torch.testing.assert_close(found[place], of_text(texts[row], len(texts[row]), RULES[row], logits[place]))


PROMPTS = [[5, 6, 7, 8], [3, 4], [9, 9, 2]]
NEW = 12
ENDS = [17, 40]
SINGLE: dict[str, list[dict[str, Any]]] = {
    "repetition": [{"repetition_penalty": penalty} for penalty in (1.3, 1.0, 2.5)],
    "frequency": [{"frequency_penalty": penalty} for penalty in (1.5, 0.0, -0.5)],
    "presence": [{"presence_penalty": penalty} for penalty in (2.0, 1.0, 0.0)],
    "bias": [{"logit_bias": bias} for bias in ({3: 4.0, 11: 3.0}, None, {20: 100.0})],
}


def words_of(text: Sequence[int], prompt: Sequence[int]) -> list[list[int]]:
    """Forbid a token of a text, two that follow one another there, and three."""
    new = text[len(prompt) :]
    return [[new[4]], [prompt[-1], new[0]], [*new[1:4]]]


def expected_text(prompt: list[int], options: dict[str, Any], stops: list[int]) -> list[int]:
    """Return the text of transformers' own processors, in its order, with vLLM's penalties of new tokens."""
    length, processors = len(prompt), LogitsProcessorList()

    def penalised(text: Tensor, logits: Tensor) -> Tensor:
        counts = torch.bincount(text[0, length:], minlength=VOCAB)
        logits = logits - options.get("frequency_penalty", 0.0) * counts
        result: Tensor = logits - options.get("presence_penalty", 0.0) * (counts > 0)
        return result

    if options.get("logit_bias"):
        bias = {(token,): value for token, value in options["logit_bias"].items()}
        processors.append(SequenceBiasLogitsProcessor(bias))
    processors.append(RepetitionPenaltyLogitsProcessor(options.get("repetition_penalty", 1.0)))
    processors.append(penalised)
    if options.get("bad_words"):
        processors.append(NoBadWordsLogitsProcessor(options["bad_words"]))
    if options.get("min_new_tokens"):
        least = options["min_new_tokens"]
        processors.append(MinNewTokensLengthLogitsProcessor(length, least, stops, device="cpu"))
    text: list[int] = tiny_model("bamba").generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, eos_token_id=stops or None, pad_token_id=0,
        logits_processor=processors,
    )[0].tolist()  # fmt: skip
    return text


def way(name: str) -> dict[str, Any]:
    """Return how to draft."""
    if name == "suffix":
        return {"drafter": SuffixDrafter(), "budget": 8}
    drafter = near_drafter() if name == "model" else FusedDrafter(near_drafter(), SuffixDrafter())
    return {"drafter": drafter, "growth": Calibrated(3), "budget": 9}


def together(each: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of all prompts as lists."""
    neutral = {"logit_bias": None, "bad_words": None, "min_new_tokens": 0, "repetition_penalty": 1.0}
    names = {name for options in each for name in options}
    return {name: [options.get(name, neutral.get(name, 0.0)) for options in each] for name in names}


@pytest.mark.parametrize(
    ("name", "drafts", "count"),
    slow_unless(
        lambda *case: case[:2] in (("all", "model"), ("words", "suffix"), ("minimum", "model")),
        [
            (name, drafts, 1 if (place + len(drafts)) % 2 else 3)
            for place, name in enumerate((*SINGLE, "words", "minimum", "all"))
            for drafts in ("suffix", "model")
        ],
    ),
)
def test_greedy_text_is_that_of_transformers_own_processors(name: str, drafts: str, count: int) -> None:
    prompts, lm, stops = PROMPTS[:count], launched(), list[int]()
    plain = stree.generate(lm, prompts, NoDrafter(), max_new_tokens=NEW).sequences
    each: list[dict[str, Any]] = SINGLE.get(name, [{}, {}, {}])
    words = [{"bad_words": words_of(text, prompt)} for text, prompt in zip(plain, prompts, strict=True)]
    if name in ("words", "all"):
        each = words
    if name == "all":
        each = [{**own, **{key: value for part in SINGLE.values() for key, value in part[row].items()}}
                for row, own in enumerate(words)]  # fmt: skip
    if name in ("minimum", "all"):
        stops = sorted({text[len(prompt) + 2] for text, prompt in zip(plain, prompts, strict=True)})
        each = [{**own, "min_new_tokens": least} for own, least in zip(each, (6, 0, 9), strict=False)]
    each = each[:count]
    options: dict[str, Any] = {**together(each), "max_new_tokens": NEW, "stop_token_ids": stops}
    out = stree.generate(lm, prompts, **way(drafts), **options).sequences
    expected = [expected_text(prompt, own, stops) for prompt, own in zip(prompts, each, strict=True)]
    assert out == expected
    without = [expected_text(prompt, {}, stops) for prompt in prompts]
    assert out[0] != without[0], "the rule changes the text"


@pytest.mark.parametrize("drafts", slow_unless(lambda name: name == "model", ["suffix", "model"]))
def test_sampled_text_under_match_is_that_of_plain_decoding(drafts: str) -> None:
    rules = together([{**RULES[0], "bad_words": [[4], [2, 3]]}, {**SINGLE["bias"][0]}, {"frequency_penalty": 1.0}])
    options: dict[str, Any] = {**rules, "sampling": Sampling(0.8), "max_new_tokens": 14, "stop_token_ids": ENDS}
    plain = stree.generate(launched(), PROMPTS, NoDrafter(), **options).sequences
    for max_batch in (None, 2):
        how = {**way(drafts), "verifier": "match", "max_batch": max_batch}
        found = stree.generate(launched(), PROMPTS, **how, **options)
        assert found.sequences == plain
    assert all(4 not in text[4:] for text in plain[:1])


def test_a_draft_model_follows_the_rules_of_the_target() -> None:
    options: dict[str, Any] = {"allowed_token_ids": [3, 8, 20], "max_new_tokens": 20, "budget": 5, "growth": "chain:4"}
    lm, sampling = launched(), Sampling(1.0)
    out = stree.generate(lm, PROMPTS[:1], launched(), sampling=sampling, repetition_penalty=2.0, **options)
    assert out.stats["tau"] == 5, "the same model under the same rules: what it drafts is accepted whole"
    assert set(out.sequences[0][4:]) <= {3, 8, 20}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["suffix", "model"])
def test_captured_steps_follow_the_rules_and_other_values_need_no_capture(
    drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every: list[dict[str, Any]] = [
        {"presence_penalty": 1.0, "logit_bias": {3: 2.0}, "bad_words": [[8, 2]], "min_new_tokens": 5},
        {"presence_penalty": 2.0, "logit_bias": {9: 3.0}, "bad_words": [[3, 4]], "min_new_tokens": 3},
        {},
        {"presence_penalty": 0.5, "repetition_penalty": 1.4},
    ]
    common: dict[str, Any] = {**way(drafts), "max_new_tokens": 14, "stop_token_ids": ENDS}
    expected = [stree.generate(launched(), PROMPTS, **common, **rules) for rules in every]
    lm = captured(monkeypatch)
    found = [stree.generate(lm, PROMPTS, **common, **rules) for rules in every]
    for out, one in zip(found, expected, strict=True):  # what is drafted follows the rules, too
        assert (out.sequences, out.stats["tau"]) == (one.sequences, one.stats["tau"])
    captures = [out.stats["graphs"]["graphs"] for out in found]
    assert captures[0] < captures[2] and (drafts != "model" or captures[1] == captures[0])
    assert all(out.stats["graphs"]["replays"] > 0 for out in found)


def test_requests_of_an_engine_have_rules_of_their_own() -> None:
    each: list[dict[str, Any]] = [{"repetition_penalty": 1.7, "logit_bias": {3: 2.0}}, {}, {"bad_words": [[9], [2, 3]]}]
    expected = [
        stree.generate(launched(), [prompt], **way("suffix"), **own, max_new_tokens=10).sequences[0]
        for prompt, own in zip(PROMPTS, each, strict=True)
    ]
    with stree.Engine(launched(), **way("suffix"), max_batch=2, max_length=64) as engine:
        handles = [engine.submit(prompt, **own, max_new_tokens=10) for prompt, own in zip(PROMPTS, each, strict=True)]
        assert [handle.result(60).sequences[0] for handle in handles] == expected
        with pytest.raises(TypeError, match="unknown option logits_processor; token rules are logit_bias, rep"):
            engine.submit([1], logits_processor=print)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_leave_a_distribution(sign: int) -> None:
    rules: dict[str, Any] = {"repetition_penalty": 1000.0**-sign, "logit_bias": {5: sign * 1e20, 6: sign * 1e20}}
    rules |= {"presence_penalty": -sign * 1e20, "frequency_penalty": -sign * 1e20}
    drawn = stree.generate(launched(), PROMPTS, **way("model"), **rules, sampling=Sampling(0.01), max_new_tokens=8)
    assert all((5 in new or 6 in new) == (sign > 0) for new in drawn.new_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": [1, 2, 3]}, "logit_bias must be a dict of tokens and numbers, got 1"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias has token {VOCAB}, outside the vocabulary"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias must be in \[-1e\+20, 1e\+20\], got nan"),
        ({"logit_bias": {1: 1e308}}, "logit_bias must be in .*, got 1e.308"),
        ({"presence_penalty": -1e39}, "presence_penalty must be in .*, got -1e.39"),
        ({"repetition_penalty": 1e-50}, r"repetition_penalty must be in \[0.001, 1000.0\], got 1e-50"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must be a list of token ids"),
        ({"presence_penalty": "1"}, "presence_penalty must be a number, got '1'"),
        ({"frequency_penalty": float("inf")}, r"frequency_penalty must be in .*, got inf"),
        ({"bad_words": []}, "bad_words must hold at least one token list, got none"),
        ({"bad_words": [[1], []]}, "bad_words must hold at least one token, got none"),
        ({"bad_words": [1, 2, 3]}, "bad_words must be a list of token ids"),
        ({"bad_words": [[-1]]}, "bad_words has token -1, outside"),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold at least one token, got none"),
        ({"allowed_token_ids": [[1], [2]]}, "allowed_token_ids must be one for all prompts or one for each of 3"),
        ({"allowed_token_ids": [4], "bad_words": [[1, 4]]}, "may leave no token to draw"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, r"min_new_tokens must be in \[0, max_new_tokens 4\], got 5"),
        ({"min_new_tokens": 1.5}, "min_new_tokens must be an integer, got 1.5"),
    ],
)
def test_rules_that_are_none_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stree.generate(launched(), PROMPTS, **options)
