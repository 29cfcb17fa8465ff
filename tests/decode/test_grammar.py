"""Grammars in the decode loop: each node by every text that matches, each text as transformers' own generate has it.

Run: python -m pytest tests/decode/test_grammar.py
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from helpers.captured import captured, launched, near_drafter
from helpers.fast_cases import slow_unless
from helpers.grammars import END, letters_tokenizer, masked, regular
from helpers.tiny_models import VOCAB, path_to, random_tree, real_nodes, right_padded, tiny_model
from tokenizers import normalizers
from torch import Tensor
from transformers import LogitsProcessorList

import stree
from stree import Grammar, Sampling, TokenTree
from stree.decode.batch_grammars import BatchGrammars
from stree.decode.logits_processors import TreeProcessing
from stree.decode.token_rules import TokenRules
from stree.drafters import FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Static
from stree.kernels.step.texts import Seen

PATTERNS = ["(ab|c){1,4}a?", "[ab]{2}c{0,3}(ab)?", "a|bc"]
TOKENIZER = letters_tokenizer()
assert len(TOKENIZER) < VOCAB, "logits of tokens that the tokenizer does not have are excluded, too"


def processing(vocab: int, patterns: Sequence[str | None], prompt_lengths: Sequence[int]) -> TreeProcessing:
    """Begin a row for each pattern."""
    found, ends = TreeProcessing(None, len(patterns), vocab, torch.device("cpu")), frozenset({END})
    for row, (pattern, length) in enumerate(zip(patterns, prompt_lengths, strict=True)):
        grammar = None if pattern is None else Grammar.regex(pattern).compile(TOKENIZER, vocab, ends, ends)
        found.begin(row, (), TokenRules(), grammar, length)
    return found


def test_every_node_may_be_followed_by_what_its_own_text_allows() -> None:
    rng, vocab, wrong, checked = random.Random(4), 6, 0, 0
    patterns, prompts = [PATTERNS[0], None, PATTERNS[1]], [[5, 5], [1], [3, 3, 3]]
    for new in ([[3], [1], [1, 2]], [[1, 2, 3], [1, 1], [2, 1, 3]]):
        process = processing(vocab, patterns, [2, 1, 3])
        texts = [prompt + own for prompt, own in zip(prompts, new, strict=True)]
        tokens, lengths = right_padded(texts)
        seen = Seen(torch.cat([tokens, torch.full((3, 4), 4)], 1), lengths - 1, tokens[:, 0])
        process.advance(seen)
        for _ in range(6):
            tree = random_tree(rng, [11, 7, 12], 12)
            drawn = torch.where(tree.is_padding, 0, tree.tokens % 4)  # some of them letters that may follow
            drawn[:, 0] = torch.tensor([text[-1] for text in texts])
            tree, logits = TokenTree(drawn, tree.parents), torch.randn(3, 12, vocab)
            process.lay_out(seen, tree, 12)
            found, before = process.target(seen, tree, logits), logits.clone()
            for row, pattern in enumerate(patterns):
                for node in real_nodes(tree, row):
                    path = new[row] + tree.tokens[row, path_to(tree, row, node)].tolist()[1:]
                    expected = logits[row, node]
                    if pattern is not None:
                        following = regular(pattern)
                        is_left = any(token not in following(path[:size]) for size, token in enumerate(path))
                        allowed = [] if is_left or END in path else following(path)
                        expected = masked(expected, allowed) if allowed else expected
                        flat = masked(logits[row, node], regular(pattern)(new[row]))
                        wrong += node > 0 and not is_left and not torch.equal(flat, expected)
                        checked += node > 0 and not is_left
                    assert torch.equal(found[row, node], expected), (row, path)
            assert torch.equal(logits, before)
    assert checked > 30 and wrong > 20, "with the root's mask many nodes differ"


PROMPTS, NEW = [[5, 6, 7, 8], [3, 4], [9, 9, 2]], 9


def expected_text(prompt: list[int], pattern: str | None, limit: int = NEW) -> list[int]:
    """Return the greedy text of transformers' own generate with a processor that knows every text that matches."""
    following = None if pattern is None else regular(pattern, most=9)

    def exclude(text: Tensor, logits: Tensor) -> Tensor:
        new = text[0, len(prompt) :].tolist()
        return logits if following is None else masked(logits[0], following(new) or [END])[None]

    text: list[int] = tiny_model("bamba").generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=limit, eos_token_id=END, pad_token_id=0,
        logits_processor=LogitsProcessorList([exclude]),
    )[0].tolist()  # fmt: skip
    if following is not None and text[-1] == END and not following(text[len(prompt) : -1]):
        text.pop()  # nothing else could follow: no token is drawn
    return text


def way(name: str) -> dict[str, Any]:
    """Return how to draft."""
    if name in ("none", "suffix"):
        return {"drafter": NoDrafter() if name == "none" else SuffixDrafter(), "budget": 8}
    drafter = near_drafter() if name == "model" else FusedDrafter(near_drafter(), SuffixDrafter())
    return {"drafter": drafter, "growth": Calibrated(3), "budget": 9}


def options(patterns: Sequence[str | None], **others: Any) -> dict[str, Any]:
    """Return options of ``generate``, with a grammar for each prompt."""
    grammars = [None if pattern is None else Grammar.regex(pattern) for pattern in patterns]
    return {
        "grammar": grammars, "tokenizer": TOKENIZER, "max_new_tokens": NEW, "stop_token_ids": [END], **others,
    }  # fmt: skip


MIXED = [PATTERNS[0], None, PATTERNS[1]]


@pytest.mark.parametrize(
    ("drafts", "max_batch"),
    slow_unless(
        lambda drafts, max_batch: (drafts, max_batch) == ("model", 2),
        [(drafts, max_batch) for drafts in ("none", "suffix", "model", "fused") for max_batch in (None, 2, 1)],
    ),
)
def test_greedy_text_is_that_of_transformers(drafts: str, max_batch: int | None) -> None:
    expected = [expected_text(prompt, pattern) for prompt, pattern in zip(PROMPTS, MIXED, strict=True)]
    out = stree.generate(launched(), PROMPTS, **way(drafts), **options(MIXED), max_batch=max_batch)
    assert out.sequences == expected
    assert out.sequences[0] != expected_text(PROMPTS[0], None), "the grammar changes the text"
    reasons = ["stop" if len(new) < NEW or new[-1] == END else "length" for new in out.new_tokens]
    assert out.stats["finish_reasons"] == reasons


def test_a_draft_model_follows_the_grammar_of_the_target() -> None:
    given: dict[str, Any] = {"grammar": Grammar.regex("[abc]{20}"), "tokenizer": TOKENIZER, "sampling": Sampling(1.0)}
    out = stree.generate(launched(), PROMPTS[:1], launched(), growth="chain:4", max_new_tokens=20, **given)
    assert out.stats["tau"] == 5 and set(out.new_tokens[0]) <= {1, 2, 3}, "what the same model drafts is accepted"


def test_tokens_that_are_forced_are_verified_at_once_without_a_draft() -> None:
    given: dict[str, Any] = {"grammar": Grammar.regex("[abc](abcab|bcabc)c"), "tokenizer": TOKENIZER}
    plain = stree.generate(launched(), PROMPTS, NoDrafter(), **given)
    for budget, steps in ((8, 2), (3, 4)):
        out = stree.generate(launched(), PROMPTS, SuffixDrafter(), budget=budget, **given)
        assert out.new_tokens == plain.new_tokens and {len(new) for new in out.new_tokens} == {7}
        assert out.stats["steps"] <= steps < plain.stats["steps"]


@pytest.mark.parametrize("stops", [[END], []])
def test_a_text_that_nothing_can_follow_ends_without_a_stop_token(stops: list[int]) -> None:
    out = stree.generate(launched(), PROMPTS, **way("model"), **options(["cab", "ab", "b"], stop_token_ids=stops))
    assert out.new_tokens == [[3, 1, 2], [1, 2], [2]] and set(out.stats["finish_reasons"]) == {"stop"}


@pytest.mark.parametrize(("normalizer", "text"), [(normalizers.NFC(), "e\u0301ne"), (None, "n<end>e")])
def test_certain_characters_that_the_tokenizer_changes_are_written_as_they_are(normalizer: Any, text: str) -> None:
    tokenizer = copy.deepcopy(letters_tokenizer("eÌģÃ©<nd>"))  # the bytes of a combining accent, and those of é
    tokenizer.backend_tokenizer.normalizer = normalizer
    for drafts in ("none", "suffix", "model"):
        given = {**options([text] * 3, max_new_tokens=12), "tokenizer": tokenizer}
        out = stree.generate(launched(), PROMPTS, **way(drafts), **given)
        assert {tokenizer.decode(new) for new in out.new_tokens} == {text}


@pytest.mark.parametrize("end", [END, 40])
def test_tokens_behind_ids_that_have_no_token_are_drawn_too(end: int) -> None:
    given = options(["[abc]+"], stop_token_ids=[end], sampling=Sampling(1.0), num_samples=30)
    given["tokenizer"] = letters_tokenizer("abc", (1, 2, 30), end)
    drawn = stree.generate(launched(), PROMPTS[:1], **way("model"), **given).new_tokens
    assert {token for new in drawn for token in new} == {1, 2, 30, end}


def test_a_text_that_is_whole_goes_on_where_no_stop_token_is_wanted() -> None:
    given: dict[str, Any] = {"grammar": Grammar.regex("(ab)+"), "tokenizer": TOKENIZER, "max_new_tokens": 6}
    bias = {END: 100.0}
    out = stree.generate(launched(), PROMPTS[:1], stop_token_ids=[], logit_bias=bias, **given)
    assert out.new_tokens[0] == [1, 2] * 3 and out.stats["finish_reasons"] == ["length"]
    out = stree.generate(launched(), PROMPTS[:1], stop_token_ids=[END], logit_bias=bias, **given)
    assert out.new_tokens[0] == [1, 2, END]
    out = stree.generate(launched(), PROMPTS[:1], stop_token_ids=[2], logit_bias=bias, **given)
    assert out.new_tokens[0] == [1, 2], "a letter that stops is no end of the text for the grammar"


@pytest.mark.parametrize("pattern", ["(a|b|cx)+", "(a|b|c[xy]z)+"])  # the tokenizer has none of x, y and z
def test_a_text_ends_with_an_error_where_its_own_tokens_cannot_be_followed_and_no_draft_ends_it(pattern: str) -> None:
    prompts, ends = [[number, 8, number] for number in (4, 5, 7, 11)], set()
    for drafts in ("none", "suffix", "model"):
        given = {**way(drafts), **options([pattern] * 4), **({"growth": Static([3, 1])} if drafts == "model" else {})}
        out = stree.generate(launched(), prompts, **given)
        for new, reason in zip(out.new_tokens, out.stats["finish_reasons"], strict=True):
            assert reason.startswith("error: grammar cannot be followed: the tokenizer has no token") == (3 in new)
            assert 3 not in new or new.index(3) == len(new) - 1, "what follows was drawn without a mask"
        ends.add(str([new[: new.index(3)] if 3 in new else new for new in out.new_tokens]))
    assert len(ends) == 1 and {3 in new for new in out.new_tokens} == {False, True}


def test_a_token_behind_which_a_grammar_is_too_complex_is_not_drawn_from_an_unmasked_distribution() -> None:
    many = 1200  # optional parts, as a schema of as many optional properties has
    rules = [f'w{number}: (A "c")? w{number + 1}' for number in range(many)]
    grammar = Grammar.lark("\n".join(['start: (A | "c" w0)+', "A: /[ab]/", *rules, f'w{many}: "a"']))
    given = {**options([None] * 2), "grammar": grammar}
    plain = stree.generate(launched(), [PROMPTS[0], [5, 8, 5]], "none", **given)
    is_error = [reason.startswith("error") for reason in plain.stats["finish_reasons"]]
    assert is_error == [False, True], "only the second text meets the limit"
    for drafts in ("suffix", "model"):
        shape = {"growth": Static([3, 1])} if drafts == "model" else {}
        out = stree.generate(launched(), [PROMPTS[0], [5, 8, 5]], **way(drafts) | shape, **given)
        assert out.new_tokens == plain.new_tokens
        assert out.stats["finish_reasons"] == plain.stats["finish_reasons"]
    assert out.stats["finish_reasons"][1].startswith("error: grammar cannot be followed: Parser Error")


def test_a_stream_and_choices_and_lark() -> None:
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "max_new_tokens": 9, "stop_token_ids": [END]}
    stream = stree.stream(launched(), PROMPTS[0], grammar=Grammar.choice(["bab", "bac"]), **given)
    assert [*stream] in ([2, 1, 2], [2, 1, 3])
    pairs = Grammar.lark('start: "c" | "a" start "b"')
    for prompt in PROMPTS:
        new = stree.generate(launched(), [prompt], grammar=pairs, sampling=Sampling(1.0), **given).new_tokens[0]
        count = new.index(3) if 3 in new else len(new)
        assert new == [1] * count + ([3] + [2] * count)[: 9 - count]
    ebnf = stree.generate(launched(), PROMPTS[:1], grammar=Grammar.lark('root ::= "ba" "b"'), **given)
    assert ebnf.new_tokens == [[2, 1, 2]]


@pytest.mark.parametrize(
    ("drafts", "sampled"),
    slow_unless(
        lambda *case: case == ("none", False),
        [(drafts, sampled) for drafts in ("none", "suffix", "model", "fused") for sampled in (False, True)],
        in_ci=lambda drafts, sampled: (drafts, sampled) in (("model", False), ("fused", True)),
    ),
)
def test_captured_steps_are_replayed_with_and_without_a_grammar(
    drafts: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[list[str | None]] = [[None] * 3, MIXED, [PATTERNS[1], PATTERNS[0], None]]
    given = [{**way(drafts), **options(own, sampling=Sampling(0.8 * sampled)), "max_batch": 2} for own in ways]
    expected = [stree.generate(launched(), PROMPTS, **own) for own in given]
    assert expected[1].sequences != expected[0].sequences != expected[2].sequences
    lm = captured(monkeypatch)
    for which in (0, 1, 1, 2, 0):  # one graph serves both grammars
        found = stree.generate(lm, PROMPTS, **given[which])
        assert found.sequences == expected[which].sequences and found.stats["tau"] == expected[which].stats["tau"]
        assert not found.stats["graphs"]["not_captured"]
        if which == 2:
            assert found.stats["graphs"]["replays"] >= found.stats["steps"] - 2
    monkeypatch.setattr(BatchGrammars, "lay_out", lambda *_: None)
    assert stree.generate(lm, PROMPTS, **given[1]).sequences != expected[1].sequences, "masks are an input"


@pytest.mark.parametrize("way", [NoDrafter, near_drafter])
@pytest.mark.parametrize("is_captured", [True, False])
def test_a_grammar_decides_where_token_rules_leave_none_of_its_tokens(
    is_captured: bool, way: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "drafter": way()}
    lm = captured(monkeypatch) if is_captured else launched()
    for rules in ({"allowed_token_ids": [1, 2]}, {"bad_words": [[3], [2, 1]]}, {"min_new_tokens": 12}):
        out = stree.generate(lm, PROMPTS[:1], grammar=Grammar.regex("(ab){4}c"), **given, **rules)
        assert out.new_tokens[0] == [1, 2] * 4 + [3], rules
        both = stree.generate(lm, PROMPTS[:1], grammar=Grammar.regex("[abc]{6}"), **given, **rules).new_tokens[0]
        assert len(both) == 6 and (3 not in both or "min_new_tokens" in rules), "else the rules hold as well"


TEXT = cast(Any, "a+")
SCHEMA = Grammar.json_schema({"type": "integer"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stree.generate(launched(), PROMPTS, grammar=TEXT), "grammar must be an object such as"),
        (lambda: stree.generate(launched(), PROMPTS, grammar=SCHEMA), "grammar needs tokenizer=, a fast .* got none"),
        (lambda: stree.generate(launched(), PROMPTS, **options(PATTERNS[:2])), "grammar must be one for all prompts"),
        (lambda: stree.generate(launched(), PROMPTS, **options([""] * 3)), "grammar allows no text"),
        (lambda: stree.generate(launched(), PROMPTS, **options(["d"] * 3)), "the tokenizer has no token for what"),
        (
            lambda: stree.generate(launched(), PROMPTS, near_drafter(), overlap=True, **options(PATTERNS)),
            "overlap takes no logits_processor, grammar",
        ),
        (lambda: Grammar.regex("a").compile(letters_tokenizer(), 3, frozenset(), frozenset()), "vocab size too small"),
    ],
)
def test_a_grammar_that_a_text_cannot_have_is_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, stree.GenerationError), match=message):
        make()
