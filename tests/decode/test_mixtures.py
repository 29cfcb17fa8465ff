"""Sequences of one batch have their own sampling parameters, seeds, limits and stop tokens, and join and leave.

Run: python -m pytest tests/decode/test_mixtures.py
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from helpers.captured import captured, launched, near_drafter
from helpers.draft_steps import GROWTHS
from helpers.fast_cases import slow_unless
from helpers.tiny_models import random_texts
from torch import Tensor

import stree
from stree.budget.policy import BudgetPolicy
from stree.decode.logits_processors import LogitsProcessor, RowProcessors
from stree.decode.loop import DecodeLoop
from stree.decode.request import Batch, Request
from stree.decode.sequences import Sequences
from stree.decode.settings import Settings
from stree.drafters import FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, TargetInit
from stree.sampling import Sampling

TEXTS = [*random_texts(random.Random(5), [6, 4, 9]), [4, 5, 6, 4, 5, 6, 4], [8, 8, 3], [7, 1, 2]]
KINDS = [
    Sampling(), Sampling(0.8), Sampling(1.0, top_k=5), Sampling(1.2, top_p=0.8), Sampling(0.7, min_p=0.05), Sampling(),
]  # fmt: skip
EACH: dict[str, Any] = {"seed": [3, 1, 1, 7, 2**63 + 5, 0], "max_new_tokens": [12, 9, 14, 12, 1, 8]}
DRAFTERS = {"none": NoDrafter(), "suffix": SuffixDrafter(), "fused": FusedDrafter(near_drafter(), SuffixDrafter())}


def arguments(name: str) -> dict[str, Any]:
    """Return drafter, growth and budget for a drafter's or a growth's name."""
    if name in DRAFTERS:
        return {"drafter": DRAFTERS[name], "growth": GROWTHS["calibrated"], "budget": 1 if name == "none" else 13}
    return {"drafter": near_drafter(), "growth": GROWTHS[name], "budget": 12}


@cache
def stops() -> list[list[int]]:
    """Return stop tokens for every prompt, of which that of the first, which is greedy, ends its text early."""
    greedy = stree.generate(launched(), TEXTS[:1], NoDrafter(), max_new_tokens=9).sequences[0]
    return [[greedy[len(TEXTS[0]) + 3]], [60], [], [], [], [61, 62, 63]]


@cache
def texts_alone(name: str) -> list[list[int]]:
    """Return the text of every prompt in a batch in which all prompts have its parameters."""
    lm, texts = launched(), []
    for place, kind in enumerate(KINDS):
        own = {key: values[place] for key, values in EACH.items()}
        out = stree.generate(lm, TEXTS, **arguments(name), sampling=kind, stop_token_ids=stops()[place], **own)
        texts.append(out.sequences[place])
    return texts


WAYS = slow_unless(
    ("calibrated").__eq__,
    (*DRAFTERS, *(name for name, growth in GROWTHS.items() if growth is not None)),
    in_ci=("fused", "calibrated", "rsds").__contains__,
)


@pytest.mark.parametrize("name", WAYS)
def test_a_text_in_a_mixture_is_that_of_a_batch_of_its_own_kind(name: str) -> None:
    for max_batch in (None, 2):
        out = stree.generate(
            launched(), TEXTS, **arguments(name), sampling=KINDS, stop_token_ids=stops(), max_batch=max_batch, **EACH
        )
        assert out.sequences == texts_alone(name)
        assert out.stats["finish_reasons"] == ["stop", *["length"] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_one_captured_step_serves_all_mixtures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, options = captured(monkeypatch), {"stop_token_ids": stops(), "max_length": 40, **EACH}
    for max_batch in (2, 2):
        out = stree.generate(lm, TEXTS, **arguments(name), sampling=KINDS, max_batch=max_batch, **options)
        assert out.sequences == texts_alone(name)
        assert not out.stats["graphs"]["not_captured"]
    other = [KINDS[place] for place in (3, 0, 5, 4, 2, 1)]
    found = stree.generate(lm, TEXTS, **arguments(name), sampling=other, max_batch=2, **options)
    assert found.stats["graphs"]["replays"] >= found.stats["steps"] - 6, "no graph was captured for another mixture"
    expected = stree.generate(launched(), TEXTS, **arguments(name), sampling=other, max_batch=2, **options)
    assert found.sequences == expected.sequences


def test_sequences_join_and_leave_a_running_batch() -> None:
    lm, kinds = launched(), frozenset(KINDS)
    batch = Batch(iter(()), kinds, most_stops=3, max_batch=3, max_length=40, prompt_length=40, refills=True)
    sequences = Sequences(cancelled=lambda request: request.sequence == 2 and len(sequences.all[2].new) > 4)
    loop = DecodeLoop(Settings(lm, near_drafter()), batch, sequences)
    requests = [
        Request(
            text, KINDS[place], EACH["max_new_tokens"][place], frozenset(stops()[place]), EACH["seed"][place], place
        )
        for place, text in enumerate(TEXTS)
    ]
    every = [sequences.add(request) for request in requests]
    with torch.no_grad():
        loop.start(BudgetPolicy(GROWTHS["calibrated"], 12), every[:1], batch_size=3)
        for place, sequence in enumerate(every[1:], 1):
            while sequences.free_row() is None:
                loop.advance()
            loop.admit(sequence)
            if place % 2:
                loop.advance()
        with pytest.raises(RuntimeError, match="every row of the batch holds a sequence that has not ended"):
            while True:
                loop.admit(sequences.add(requests[0]))
        while sequences.is_running:
            loop.advance()
    alone = texts_alone("calibrated")
    assert [sequence.reason for sequence in every] == ["stop", "length", "cancelled", *["length"] * 3]
    assert [sequence.tokens for place, sequence in enumerate(every) if place != 2] == alone[:2] + alone[3:]
    assert every[2].tokens == alone[2][: len(every[2].tokens)]


def prefers(token: int) -> LogitsProcessor:
    """Return a processor that prefers a token, and another one that all of the text decides on."""

    def process(input_ids: Tensor, logits: Tensor) -> Tensor:
        weights = torch.arange(1, input_ids.shape[1] + 1) * (input_ids[0] + 1)
        preferred = torch.tensor([token, int(weights.sum()) % logits.shape[1]])
        return logits.index_add(1, preferred, torch.full((1, 2), 3.0))

    return process


@pytest.mark.parametrize(
    ("drafts", "sampling"), [("model", Sampling()), ("fused", Sampling(0.8))], ids=["model", "fused"]
)
def test_processors_follow_their_texts_when_rows_are_selected(drafts: str, sampling: Sampling) -> None:
    lm, prompts = launched(), random_texts(random.Random(2), [5, 3, 7, 4])
    drafter = ModelDrafter(lm) if drafts == "model" else DRAFTERS["fused"]
    requests = [
        Request(prompt, sampling, new, sequence=place, processors=(prefers(3 * place),))
        for place, (prompt, new) in enumerate(zip(prompts, (9, 20, 12, 15), strict=True))
    ]
    batch = Batch(
        iter(()), frozenset([Sampling(), Sampling(0.8)]), most_stops=0, max_batch=1, max_length=40, prompt_length=40,
        refills=True, processor=RowProcessors(),
    )  # fmt: skip
    loop = DecodeLoop(Settings(lm, drafter, verifier="match"), batch, Sequences())

    def select(newcomer: Request | None = None) -> None:
        assert loop.can_select
        loop.select([row for row, text in enumerate(loop.sequences.rows) if text.reason is None], newcomer)

    with torch.no_grad():
        loop.start(BudgetPolicy(Chain(3), 8), [], batch_size=1)
        for request in requests:
            select(request)
            loop.admit(loop.sequences.add(request))
            for _ in range(2):
                loop.advance()
        while loop.sequences.is_running:
            loop.advance()
            if loop.sequences.is_running:
                select()
    expected = stree.generate(
        lm, prompts, budget=1, sampling=sampling, max_new_tokens=[9, 20, 12, 15],
        logits_processor=[prefers(3 * place) for place in range(4)],
    ).sequences  # fmt: skip
    assert [text.tokens for text in loop.sequences.all] == expected
    if drafts == "model" and sampling.is_greedy:
        report = loop.stats.report(loop.sequences.num_new_tokens)
        assert report["tau"] == 4, "the same model, processed alike, drafts what the target takes"


REFUSED = [
    ({"sampling": KINDS[:2]}, ValueError, "sampling must be one for all prompts or one for each of 6, got a list of 2"),
    ({"seed": [1]}, ValueError, "seed must be one for all prompts or one for each of 6, got a list of 1"),
    ({"max_new_tokens": [1] * 7}, ValueError, "max_new_tokens must be one .* for each of 6, got a list of 7"),
    ({"max_new_tokens": [1, 1, 0, 1, 1, 1]}, ValueError, "max_new_tokens must be at least 1, got 0"),
    ({"stop_token_ids": [[1], [2]]}, ValueError, "stop_token_ids must be one .* for each of 6, got a list of 2"),
    ({"stop_token_ids": [[1], 2]}, TypeError, "stop_token_ids must be a list of token ids, integers"),
    (
        {"sampling": KINDS, "drafter": near_drafter(), "growth": TargetInit(2, 2), "allow_lossy": True},
        ValueError, "TargetInit takes one sampling for all prompts, got 5",
    ),
    ({"sampling": [*KINDS[:5], 0.8]}, TypeError, r"sampling must be an object such as stree.Sampling.*, got 0.8"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_parameters_that_fit_no_prompt_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stree.generate(launched(), TEXTS, **options)


def test_an_iterator_of_stop_tokens_ends_every_text() -> None:
    each: dict[str, Any] = {"drafter": NoDrafter(), "max_new_tokens": [9, 9]}
    token = stree.generate(launched(), TEXTS[:1], NoDrafter(), max_new_tokens=3).sequences[0][-1]
    out = stree.generate(launched(), TEXTS[:1] * 2, stop_token_ids=iter([token]), **each)
    assert out.stats["finish_reasons"] == ["stop"] * 2


def test_an_iterator_of_prompts_has_one_set_of_parameters() -> None:
    with pytest.raises(ValueError, match="seed must be one for all prompts of an iterator, got a list of 2"):
        stree.generate(launched(), iter(TEXTS), seed=[1, 2], max_batch=2, max_length=50)
