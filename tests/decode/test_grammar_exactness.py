"""Texts under a grammar have the masked, renormalised distribution of the target, by enumeration of three tokens.

Run: python -m pytest tests/decode/test_grammar_exactness.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.grammars import END, letters_tokenizer, masked, regular
from torch import Tensor

from stree import Sampling
from stree.decode.grammar import CompiledGrammar, Grammar, GrammarEnd
from stree.decode.logits_processors import TreeProcessing
from stree.decode.token_rules import TokenRules
from stree.drafters import Drafter, FusedDrafter, SuffixDrafter
from stree.growth import RSDC, RSDS, Calibrated, Chain, Growth, Sequoia, SpecInfer, Static
from stree.kernels.step.texts import Seen
from stree.sampling import Random
from stree.testing.enumeration import EXACT, emitted_by, total_variation
from stree.testing.outcomes import all_outcomes
from stree.testing.tables import TableModel, exact_probs, table_drafter
from stree.verify import accept

VOCAB, LENGTH, ROOT = 4, 3, 2
PATTERNS = ["(a|bc|c)(b|ca)*", "a[abc]|b+c?|cab", "(ab|ba|c)+"]
NOTHING = VOCAB  # behind the end of a text


def expected(table: TableModel, pattern: str, sampling: Sampling) -> Tensor:
    """Return float64[5 ** 3], the distribution of three tokens, by the texts that match and the table alone."""
    following, joint = regular(pattern), torch.zeros((VOCAB + 1) ** LENGTH, dtype=torch.float64)

    def go_on(text: tuple[int, ...], prob: float) -> None:
        allowed = [] if text[-1:] == (END,) else following(text)
        if len(text) == LENGTH or not allowed:
            number = 0
            for token in (*text, *[NOTHING] * (LENGTH - len(text))):
                number = number * (VOCAB + 1) + token
            joint[number] += prob
            return
        probs = exact_probs(masked(table.logits[text[-1] if text else ROOT], allowed), sampling)
        for token in allowed:
            go_on((*text, token), prob * float(probs[token]))

    go_on((), 1.0)
    return joint


def emitted(
    target: TableModel, drafter: Drafter, growth: Growth | None, budget: int, sampling: Sampling, verifier: str,
    grammar: CompiledGrammar, *, masks_target: bool = True, masks_draft: bool = True,
) -> Tensor:  # fmt: skip
    """Return the distribution of the three tokens that steps under a grammar emit."""
    bound = None if growth is None else growth.bind(sampling)

    def decode(rng: Random, cases: Tensor) -> Tensor:
        batch = len(cases)
        processing = TreeProcessing.of(None, batch, VOCAB, torch.device("cpu"))
        for row in range(batch):
            processing.begin(row, (), TokenRules(), grammar, 1)
        text = torch.full((batch, 1 + LENGTH * (budget + 1)), ROOT)
        lengths, ends = torch.zeros(batch, dtype=torch.long), [GrammarEnd(grammar) for _ in range(batch)]
        first = processing.first(_texts(text, lengths + 1), torch.arange(batch), target.logits[text[:, 0]])
        run = drafter.start(VOCAB, [[ROOT]] * batch, rng.at(1 + lengths))
        text[:, 1] = pending = rng.at(lengths).choice("target", sampling.probs(first), torch.zeros(batch).long() + 1)
        lengths += 1
        for _ in range(LENGTH - 1):
            seen = Seen(text, lengths.clone(), pending)
            processing.advance(seen)
            run.processor, run.forced = processing.draft(seen) if masks_draft else None, processing.forced
            draft = run.propose(pending, bound, budget)
            logits = target.logits[draft.tree.tokens]
            if masks_target:
                processing.lay_out(seen, draft.tree, budget)
                logits = processing.target(seen, draft.tree, logits)
            probs = None if verifier == "match" else draft.probs
            accepted = accept(draft.tree, logits, sampling, rng.at(lengths), probs, verifier, draft.max_depth)
            new = emitted_by(draft.tree.tokens, accepted.path, accepted.path_lengths, accepted.next_token)
            text.scatter_(1, 1 + lengths[:, None] + torch.arange(new.shape[1]), new)
            lengths += accepted.path_lengths
            run.observe(accepted)
            pending = accepted.next_token
        number = torch.zeros(batch, dtype=torch.long)
        for row, (tokens, end) in enumerate(zip(text[:, 1 : 1 + LENGTH].tolist(), ends, strict=True)):
            count = (tokens.index(END) + 1) if END in tokens else LENGTH
            count = min(count, end.observe(tokens, None) or LENGTH)
            for token in (*tokens[:count], *[NOTHING] * (LENGTH - count)):
                number[row] = number[row] * (VOCAB + 1) + token
        return number

    joint = torch.zeros((VOCAB + 1) ** LENGTH, dtype=torch.float64)
    for numbers, _, weight in all_outcomes(decode, 1, rows=2048):
        joint.index_add_(0, numbers, weight)
    return joint


def _texts(tokens: Tensor, lengths: Tensor) -> Any:
    """Return prompts as ``first`` reads them."""
    return Seen(tokens, lengths, tokens[:, 0])


def compiled(pattern: str) -> CompiledGrammar:
    ends = frozenset({END})
    return Grammar.regex(pattern).compile(letters_tokenizer(), VOCAB, ends, ends)


Case = tuple[str, Growth | None, int, str]
QUICK: list[Case] = [("model", Chain(1), 2, "rejection"), ("model", Static([2]), 3, "traversal")]
OTHERS: list[Case] = [
    ("model", Chain(2), 3, "rejection"),
    ("model", Chain(2), 3, "block"),
    ("model", Chain(2), 3, "traversal"),
    ("model", Static([2]), 3, "rejection"),
    ("model", Chain(1), 2, "match"),
    ("model", Static([2]), 3, "match"),
    ("suffix", None, 2, "match"),
    ("fused", Chain(1), 3, "traversal"),
    ("model", Calibrated(depth=1, ranks=2), 3, "traversal"),
]
GROWTHS: list[Growth] = [RSDC([2]), RSDS(2, 1), SpecInfer([2]), Sequoia(depth=1)]
CASES = [(case, PATTERNS[0]) for case in QUICK]
SLOW = [(case, pattern) for pattern in PATTERNS for case in [*QUICK, *OTHERS] if (case, pattern) not in CASES]
EVERY = [
    (("model", growth, 3, verifier), PATTERNS[1])
    for growth in GROWTHS
    for verifier in ("match", "rejection", "traversal")
]


def distance(case: Case, pattern: str, **masks: bool) -> float:
    """Return the total variation between what steps emit and the masked distribution."""
    kind, growth, budget, verifier = case
    target, draft = TableModel.random(VOCAB, 3), TableModel.random(VOCAB, 103)
    drafter: Drafter = SuffixDrafter() if kind == "suffix" else table_drafter(draft)
    drafter = FusedDrafter(drafter, SuffixDrafter()) if kind == "fused" else drafter
    found = emitted(target, drafter, growth, budget, Sampling(0.8), verifier, compiled(pattern), **masks)
    return total_variation(found, expected(target, pattern, Sampling(0.8)))


def name_of(value: Any) -> str:
    """Name a case in the list of tests."""
    return value if isinstance(value, str) else f"{value[0]}-{type(value[1]).__name__}-{value[3]}"


def _in_ci(case: Case, pattern: str) -> bool:
    return case[3] != "match" and SLOW.index((case, pattern)) % 4 == 0


SLOW_CASES = [
    *slow_unless(lambda *_: False, SLOW, in_ci=_in_ci),
    *slow_unless(lambda *_: False, EVERY, in_ci=lambda *one: False),
]


@pytest.mark.parametrize(("case", "pattern"), [*CASES, *SLOW_CASES], ids=name_of)
def test_texts_have_the_masked_distribution(case: Case, pattern: str) -> None:
    assert distance(case, pattern) < EXACT


def test_so_they_have_with_a_drafter_that_knows_no_grammar() -> None:
    assert distance(QUICK[0], PATTERNS[0], masks_draft=False) < EXACT


def test_masks_of_the_drafter_alone_are_not_enough() -> None:
    assert distance(QUICK[0], PATTERNS[0], masks_target=False) > 0.1
