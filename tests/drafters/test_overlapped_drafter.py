"""Drafting while the target verifies: the same texts, the exact distribution, and trees that are used.

Run: python -m pytest tests/drafters/test_overlapped_drafter.py
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.on_device import PeakMemory
from helpers.tiny_family_models import family_model
from helpers.tiny_models import patched, tiny_model
from torch import Tensor

import stree
from benchmarks.studies.lossless import ALPHA, COUNTED, PROMPT, VOCAB, exact_probs, models, p_value
from stree import generation
from stree.decode import memory
from stree.drafters import HeadDrafter, ModelDrafter, NoDrafter, SuffixDrafter, overlapped
from stree.drafters.overlapped import OverlappedDrafter
from stree.growth import Chain, Growth, Static
from stree.kernels.dispatch import as_on_device
from stree.sampling import Random, Sampling
from stree.testing.enumeration import EXACT, PLAIN, emitted_by, total_variation
from stree.testing.outcomes import all_outcomes
from stree.testing.tables import TableModel, table_drafter
from stree.verify import accept

PROMPTS = [[5, 17, 9, 33, 20], [4, 8, 9], [7], [1, 2, 3, 4]]
OPTIONS: dict[str, dict[str, Any]] = {
    "tree": {"budget": 8}, "chain": {"growth": "chain:3", "budget": 4}, "auto": {"budget": "auto"},
    "two rows for four": {"max_batch": 2, "budget": 8}, "plain": {"budget": 1},
    "sampled": {"sampling": Sampling(1.2), "verifier": "match", "budget": 8},
    "sampled rows": {"sampling": Sampling(0.7, top_k=1), "verifier": "match", "max_batch": 1, "budget": 8},
}  # fmt: skip


@pytest.mark.parametrize("own", [True, False], ids=["the target drafts", "another model drafts"])
@pytest.mark.parametrize("name", slow_unless("tree".__eq__, OPTIONS))
def test_texts_are_those_without_overlap(name: str, own: bool) -> None:
    lm = patched(tiny_model("mamba2"))
    drafter = ModelDrafter(lm if own else patched(tiny_model("llama")))
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 4, **OPTIONS[name]}
    found, expected = (stree.generate(lm, PROMPTS, drafter, overlap=overlap, **options) for overlap in (True, False))
    assert found.sequences == expected.sequences
    assert not expected.stats["reused_drafts"] and not found.stats.get("problem")
    if own and name in ("chain", "sampled rows"):
        assert found.stats["reused_drafts"] > 0


def test_a_tree_that_was_drafted_ahead_is_used_wherever_the_guess_is_right() -> None:
    lm = patched(tiny_model("mamba2"))
    out = stree.generate(lm, PROMPTS[:1], ModelDrafter(lm), growth="chain:2", budget=3, overlap=True, max_new_tokens=31)
    assert out.stats["steps"] == 10 and out.stats["reused_drafts"] == 9


class AtOnce:
    """An executor that does its work at once, in the caller's thread, so that numbers are asked for in one order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work())
        return future


def joint(target: TableModel, drafter: Any, growth: Growth, length: int) -> tuple[Tensor, int]:
    """Distribution of texts after token 0, float64[vocab ** length], and how many trees were drafted ahead and used."""
    reused = 0

    def text(rng: Random, cases: Tensor) -> list[int]:
        nonlocal reused
        run, pending, tokens = drafter.start(target.vocab, [[0]], rng), torch.zeros(1, dtype=torch.long), list[int]()
        while len(tokens) < length:
            draft = run.propose(pending, growth, 4)
            reused += draft.is_reused
            now = rng.at(torch.tensor([1 + len(tokens)]))
            accepted = accept(draft.tree, target.logits[draft.tree.tokens], PLAIN, now, draft.probs, "rejection",
                              draft.max_depth)  # fmt: skip
            emitted = emitted_by(draft.tree.tokens, accepted.path, accepted.path_lengths, accepted.next_token)
            tokens += emitted[0, : int(accepted.path_lengths[0])].tolist()
            run.observe(accepted)
            pending = accepted.next_token
        return tokens[:length]

    found = torch.zeros(target.vocab**length, dtype=torch.float64)
    for tokens, _, weight in all_outcomes(text, 1, rows=1):
        found[sum(token * target.vocab ** (length - 1 - place) for place, token in enumerate(tokens))] += float(weight)
    return found, reused


@pytest.mark.parametrize(
    "growth", slow_unless(lambda growth: growth == Static([2]), [Chain(1), Static([2])]), ids=["chain", "static"]
)
def test_texts_have_the_target_s_distribution_exactly(growth: Growth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "ThreadPoolExecutor", AtOnce)
    target, drafter = TableModel.random(2, 3), OverlappedDrafter(table_drafter(TableModel.random(2, 103)))
    found, reused = joint(target, drafter, growth.bind(PLAIN), 3)
    assert total_variation(found, target.joint(PLAIN, 3)) < EXACT and reused > 0


@pytest.mark.slow
@pytest.mark.exhaustive  # the distribution is enumerated above
def test_sampled_texts_have_the_target_s_distribution() -> None:
    lm, draft_model = models()
    options: dict[str, Any] = {"growth": "chain:1", "budget": 2, "verifier": "rejection", "max_batch": 1}
    out = stree.generate(lm, [PROMPT] * 800, ModelDrafter(draft_model), overlap=True, sampling=Sampling(1.0), seed=3,
                         max_new_tokens=COUNTED + 1, **options)  # fmt: skip
    tokens = torch.tensor(out.sequences)[:, len(PROMPT) + 1 :]
    counts = torch.bincount((tokens * VOCAB ** torch.arange(COUNTED - 1, -1, -1)).sum(1), minlength=VOCAB**COUNTED)
    assert out.stats["reused_drafts"] > 40
    assert p_value(counts, exact_probs(Sampling(1.0))) > ALPHA > p_value(counts, exact_probs(Sampling(1.5)))


@pytest.mark.slow
def test_trees_that_are_kept_by_what_they_hold_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "ThreadPoolExecutor", AtOnce)
    real = overlapped._OverlappedRun.propose

    def chosen(self: Any, pending: Any, growth: Any, budget: int) -> Any:
        if self._ready is not None and int(self._ready[0].tree.tokens[0, 1]) != 1:
            self._ready, budget = None, 1
        return real(self, pending, growth, budget)

    monkeypatch.setattr(overlapped._OverlappedRun, "propose", chosen)
    target, drafter = TableModel.random(2, 3), OverlappedDrafter(table_drafter(TableModel.random(2, 103)))
    assert total_variation(joint(target, drafter, Chain(1).bind(PLAIN), 4)[0], target.joint(PLAIN, 4)) > 1e-3


class OnCuda(Tensor):
    """A tensor of the CPU that says it is on CUDA."""

    is_cuda = True


class Stream:
    """A CUDA stream, which is noted."""

    made: list[Stream]

    def __init__(self, device: Any = None) -> None:
        self.made.append(self)

    def wait_stream(self, other: Any) -> None:
        """Do nothing: all work is done at once."""


def test_all_steps_of_a_text_draft_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    likeliest_path, used = overlapped._likeliest_path, list[Any]()

    def on_cuda(*given: Any) -> Any:
        path, lengths, last = likeliest_path(*given)
        return path, lengths, last.as_subclass(OnCuda)

    Stream.made = []
    monkeypatch.setattr(overlapped, "_likeliest_path", on_cuda)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    present = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: present)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(used.append(stream)))  # type: ignore[func-returns-value]
    lm = patched(tiny_model("mamba2"))
    stree.generate(lm, PROMPTS[:1], ModelDrafter(lm), growth="chain:2", budget=3, overlap=True, max_new_tokens=31)
    assert len(used) == 10 and used == Stream.made * 10


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=["greedy", "sampled"])
def test_both_states_and_trees_are_in_the_memory_that_is_checked(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setenv("STREE_DEBUG", "")  # under which the logits of a step are kept
    monkeypatch.setattr(overlapped, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(generation, "check_memory", lambda *given: checked.append(given))
    target, draft = (stree.TreeLM(family_model("mamba2", torch.float32, seed, vocab_size=20_000)) for seed in (0, 1))
    options: dict[str, Any] = {"sampling": sampling, "budget": 16, "max_new_tokens": 8, "overlap": True}
    with as_on_device(triton=False), PeakMemory() as taken:
        stree.generate(target, [[5, 6, 7]] * 3, ModelDrafter(draft), **options)
    assert memory.needed_bytes(*checked[0]) > 0.98 * taken.peak


class OtherRun(ModelDrafter):
    """A draft model with a run of another class."""

    def start(self, *given: Any) -> Any:
        """Begin a run that drafts nothing."""
        return NoDrafter().start(*given)


def test_what_cannot_overlap_is_refused() -> None:
    lm = patched(tiny_model("mamba2"))
    for drafter in (SuffixDrafter(), NoDrafter()):
        with pytest.raises(TypeError, match="overlap needs a draft model, which drafts without the target's hidden"):
            stree.generate(lm, PROMPTS, drafter, overlap=True)
    with pytest.raises(ValueError, match="overlap takes no logits_processor"):
        stree.generate(lm, PROMPTS, lm, overlap=True, repetition_penalty=1.2)
    with pytest.raises(TypeError, match="OtherRun.start must return ModelDrafter's own run, to overlap, got"):
        stree.generate(lm, PROMPTS, OtherRun(lm), overlap=True)
    assert not issubclass(HeadDrafter, ModelDrafter)


def test_a_failure_of_the_thread_ends_drafting_and_not_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = patched(tiny_model("mamba2"))

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(overlapped, "_after", fail)
    with pytest.raises(stree.GenerationError, match="decoded without it: out of memory") as caught:
        stree.generate(lm, PROMPTS, ModelDrafter(lm), overlap=True, budget=8, max_new_tokens=9)
    assert caught.value.output.sequences == stree.generate(lm, PROMPTS, NoDrafter(), max_new_tokens=9).sequences
