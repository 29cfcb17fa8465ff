"""Texts under a grammar have the masked, renormalised distribution of the target, by enumeration of three tokens.

Run: python -m pytest tests/decode/test_grammar_exactness.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.exact_growths import GROWTHS, RULES, WAYS
from helpers.fast_cases import slow_unless
from helpers.grammars import END, letters_tokenizer, masked, regular
from helpers.tiny_heads import target_and_block_head
from torch import Tensor

from stree import Sampling, drafters
from stree.decode.grammar import CompiledGrammar, Grammar, GrammarEnd
from stree.decode.logits_processors import TreeProcessing
from stree.decode.token_rules import TokenRules
from stree.drafters import Drafter, FusedDrafter, HeadDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, Growth, Static
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
        processing = TreeProcessing(None, batch, VOCAB, torch.device("cpu"))
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


class Head(Drafter):
    """A one-shot head of random weights whose runs read the same hidden states everywhere."""

    def __init__(self) -> None:
        head = target_and_block_head("llama", "dflash", VOCAB, torch.float64)[1]
        self.drafter, shape = HeadDrafter(head), (1, 1, len(head.hidden_layers), head.num_features)
        self.hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()

    def start(self, vocab_size: int, prompts: Any, rng: Random) -> Any:
        run = self.drafter.start(vocab_size, prompts, rng)
        run.read_prompts(range(len(prompts)), self.hidden.expand(len(prompts), -1, -1, -1))
        observe = run.observe
        run.observe = lambda acceptance: observe(  # type: ignore[method-assign]
            replace(acceptance, hidden=self.hidden.expand(*acceptance.path.shape, -1, -1))
        )
        return run


# Of each kind with all growths and verifiers, but those that use no growth with the verifiers alone.
KINDS: dict[str, Callable[[TableModel], Drafter]] = {
    "model": table_drafter,
    "head": lambda table: Head(),
    "fused": lambda table: FusedDrafter(table_drafter(table), SuffixDrafter()),
    "suffix": lambda table: SuffixDrafter(),
    "none": lambda table: NoDrafter(),
}
TOP_2 = Sampling(0.8, top_k=2)  # of what the grammar allows; with fewer outcomes, all ways are quick
Case = tuple[str, Growth | None, int, str]  # kind of drafter, growth, budget, verifier
QUICK: list[tuple[Case, Sampling]] = [
    (("model", Chain(1), 2, "rejection"), Sampling(0.8)), (("model", Static([2]), 3, "traversal"), TOP_2),
]  # fmt: skip
EVERY = [(kind, *way) for kind in ("model", "head", "fused") for way in WAYS]
EVERY += [(kind, "none", rule) for kind in ("suffix", "none") for rule in RULES if rule != "block"]


def in_ci(kind: str, name: str, verifier: str) -> bool:
    """Whether CI runs it: every other one, and few of MATCH, whose trees are slow to enumerate."""
    return EVERY.index((kind, name, verifier)) % 2 == 0 and (verifier != "match" or name in ("static", "none"))


def distance(case: Case, pattern: str, sampling: Sampling = TOP_2, **masks: bool) -> float:
    """Return the total variation between what steps emit and the masked distribution."""
    kind, growth, budget, verifier = case
    target, draft = TableModel.random(VOCAB, 3), TableModel.random(VOCAB, 103)
    found = emitted(target, KINDS[kind](draft), growth, budget, sampling, verifier, compiled(pattern), **masks)
    return total_variation(found, expected(target, pattern, sampling))


@pytest.mark.parametrize(("case", "sampling"), QUICK, ids=["chain", "siblings"])
def test_texts_have_the_masked_distribution(case: Case, sampling: Sampling) -> None:
    assert distance(case, PATTERNS[0], sampling) < EXACT


@pytest.mark.parametrize(("kind", "name", "verifier"), slow_unless(lambda *_: False, EVERY, in_ci=in_ci))
def test_so_they_have_with_every_drafter_growth_and_verifier(kind: str, name: str, verifier: str) -> None:
    growth, budget = GROWTHS.get(name, (None, 3))
    pattern = PATTERNS[EVERY.index((kind, name, verifier)) % len(PATTERNS)]
    assert distance((kind, growth, budget, verifier), pattern) < EXACT


@pytest.mark.parametrize("kind", slow_unless("model".__eq__, KINDS))
def test_masks_of_any_drafter_alone_are_not_enough(kind: str) -> None:
    assert distance((kind, Chain(1), 2, "traversal"), PATTERNS[0], Sampling(0.8), masks_target=False) > 0.1


def test_no_kind_of_drafter_is_left_out() -> None:
    public = [getattr(drafters, name) for name in drafters.__all__]
    kinds = {one for one in public if isinstance(one, type) and issubclass(one, Drafter)} - {Drafter}
    made = [make(TableModel.random(VOCAB, 1)) for make in KINDS.values()]
    assert kinds == {type(one.drafter if isinstance(one, Head) else one) for one in made}


def test_so_they_have_with_a_drafter_that_knows_no_grammar() -> None:
    assert distance(QUICK[0][0], PATTERNS[0], Sampling(0.8), masks_draft=False) < EXACT
