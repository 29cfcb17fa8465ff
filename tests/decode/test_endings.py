"""How texts end: stop tokens, lengths, cancelled, failed or interrupted; what is counted and streamed until then."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.generate_ways import NEW_TOKENS, PROMPTS, greedy_texts, lm, way
from helpers.tiny_models import VOCAB, tiny_model
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, DraftRun, NoDrafter, SuffixDrafter
from stree.growth import DySpec, Growth
from stree.sampling import Random, Sampling
from stree.verify import Acceptance


def test_a_stop_token_inside_an_accepted_path_ends_the_text_and_is_kept() -> None:
    prompt, text = PROMPTS[0], greedy_texts()[0]
    new = text[len(prompt) :]
    # Its own drafter's chain of four is accepted whole, so tokens 1..5 come of one step: stop in its middle.
    place = next(place for place in range(2, 5) if new[place] not in new[:place])
    out = stree.generate(
        lm(), [prompt], **way("self-chain"), max_new_tokens=NEW_TOKENS, stop_token_ids=[new[place], VOCAB - 1]
    )
    assert out.sequences == [text[: len(prompt) + place + 1]]
    assert out.stats["finish_reasons"] == ["stop"]
    assert out.stats["steps"] == 1
    assert out.stats["tau"] == 5, "tau counts a step's tokens before they are cut off"
    assert out.stats["rows"] == [{"steps": 1, "tau": 5.0, "acceptance_by_depth": [1.0] * 4}]


def test_a_stop_token_that_comes_first_ends_the_text_before_any_step() -> None:
    text = greedy_texts()[0]
    first = text[len(PROMPTS[0])]
    out = stree.generate(lm(), PROMPTS[:1], **way("self-chain"), stop_token_ids=[first])
    assert out.sequences == [text[: len(PROMPTS[0]) + 1]]
    assert (out.stats["steps"], out.stats["tau"], out.stats["num_new_tokens"]) == (0, 0.0, [1])


def test_texts_of_a_batch_end_at_different_times() -> None:
    stops = [text[len(prompt) + 5] for prompt, text in zip(PROMPTS, greedy_texts(), strict=True)]
    out = stree.generate(lm(), PROMPTS, **way("self-layers"), max_new_tokens=NEW_TOKENS, stop_token_ids=stops[:2])
    for prompt, text, found, reason in zip(
        PROMPTS, greedy_texts(), out.sequences, out.stats["finish_reasons"], strict=True
    ):
        ends = [place for place in range(len(prompt), len(text)) if text[place] in stops[:2]]
        assert found == text[: ends[0] + 1 if ends else len(text)]
        assert reason == ("stop" if ends else "length")
    assert {*out.stats["finish_reasons"]} == {"stop", "length"}


@pytest.mark.parametrize("new_tokens", [1, 2, 7])
def test_a_text_has_exactly_max_new_tokens(new_tokens: int) -> None:
    out = stree.generate(lm(), PROMPTS, **way("self-chain"), max_new_tokens=new_tokens)
    assert out.sequences == [text[: len(p) + new_tokens] for p, text in zip(PROMPTS, greedy_texts(), strict=True)]
    assert out.stats["num_new_tokens"] == [new_tokens] * 4
    assert out.stats["finish_reasons"] == ["length"] * 4


class Recorder(Drafter, DraftRun):
    """Passes a drafter through and notes what it does; fails or is interrupted at a step."""

    def __init__(
        self, inner: Drafter, fail_at: int = -1, failure: BaseException | None = None, part: str = "propose"
    ) -> None:
        self.inner, self.fail_at, self.failure, self.part = inner, fail_at, failure, part
        self.lengths: list[list[int]] = []
        self.calls: list[int] = []
        self.columns: list[int] = []

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Recorder:
        self.run: DraftRun = self.inner.start(vocab_size, prompts, rng)
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        self._fail("propose")
        draft = self.run.propose(pending, growth, budget)
        self.calls.append(draft.num_calls)
        self.columns.append(draft.tree.tokens.shape[1])
        return draft

    def observe(self, acceptance: Acceptance) -> None:
        self._fail("observe")
        self.lengths.append(acceptance.path_lengths.tolist())
        self.run.observe(acceptance)

    def _fail(self, part: str) -> None:
        if part == self.part and len(self.lengths) == self.fail_at:
            assert self.failure is not None
            raise self.failure


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_text_ends_at_the_model_s_own_stop_token_unless_told_otherwise(is_listed: bool) -> None:
    greedy, length = greedy_texts()[0], len(PROMPTS[0])
    model = tiny_model("bamba")
    stop = greedy[length + 5]
    model.generation_config.eos_token_id = [stop, VOCAB - 1] if is_listed else stop
    theirs = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    target = stree.TreeLM(model)
    generate = partial(stree.generate, target, PROMPTS[:1], max_new_tokens=NEW_TOKENS)
    out = generate()
    assert out.sequences == theirs.tolist() and out.stats["finish_reasons"] == ["stop"]
    ways: list[dict[str, Any]] = [{"ignore_eos": True}, {"stop_token_ids": []}]
    for on in ways:
        assert generate(**on).sequences == greedy_texts()[:1]
    other = greedy[length + 7]
    both = [generate(stop_token_ids=[other], ignore_eos=eos).sequences[0] for eos in (False, True)]
    assert both[0] == both[1] == greedy[: greedy.index(other, length) + 1]
    model.generation_config.eos_token_id = None
    assert generate().sequences == greedy_texts()[:1]


@pytest.mark.parametrize("name", ["self-chain", "mamba2-layers", "suffix"])
def test_statistics_add_up(name: str) -> None:
    arguments = way(name)
    recorder = Recorder(arguments.pop("drafter"))
    stop = [greedy_texts()[1][len(PROMPTS[1]) + 6]]
    out = stree.generate(
        lm(), PROMPTS, recorder, **{"growth": DySpec(), **arguments}, max_new_tokens=NEW_TOKENS, stop_token_ids=stop
    )
    stats = json.loads(json.dumps(out.stats))
    assert stats == out.stats
    taken = [length for lengths in recorder.lengths for length in lengths if length]
    assert stats["steps"] == len(recorder.lengths)
    assert stats["tau"] == pytest.approx(sum(taken) / len(taken))  # a path's root was emitted, its next token was not
    assert stats["draft_calls"] == sum(recorder.calls)
    assert stats["nodes_per_step"] == pytest.approx(sum(recorder.columns) / len(recorder.columns))
    reached = [sum(length > depth for length in taken) for depth in range(max(taken))]
    ratios = [after / before for before, after in zip(reached, reached[1:], strict=False)]
    assert stats["acceptance_by_depth"] == pytest.approx(ratios)
    assert stats["num_prompt_tokens"] == [len(prompt) for prompt in PROMPTS]
    assert stats["num_new_tokens"] == [len(s) - len(p) for s, p in zip(out.sequences, PROMPTS, strict=True)]
    # Emitted: one token a row from prefill, then what the steps give less what was cut off in the end.
    cut = len(PROMPTS) + sum(taken) - sum(stats["num_new_tokens"])
    assert 0 <= cut <= len(PROMPTS) * arguments["budget"]
    parts = sum(stats[part] for part in ("prefill_s", "draft_s", "verify_s", "accept_s", "commit_s"))
    assert 0 < parts <= stats["total_s"] * 1.001
    assert stats["tokens_per_s"] == pytest.approx(sum(stats["num_new_tokens"]) / stats["total_s"])


class Listener:
    """A streamer that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.num_ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.num_ends
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize("name", ["none", "self-chain", "suffix"])
def test_a_streamer_hears_the_prompt_and_then_exactly_the_new_tokens(name: str) -> None:
    listener = Listener()
    stop = [greedy_texts()[0][len(PROMPTS[0]) + 7]]
    out = stree.generate(
        lm(), PROMPTS[:1], **way(name), max_new_tokens=NEW_TOKENS, stop_token_ids=stop, streamer=listener
    )
    assert listener.heard[0] == PROMPTS[0]
    assert sum(listener.heard, []) == out.sequences[0]
    assert all(listener.heard)
    assert listener.num_ends == 1


@pytest.mark.parametrize(("name", "part"), [("self-chain", "observe"), ("suffix", "propose")])
def test_a_drafter_that_dies_is_done_without_and_said(name: str, part: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = way(name)
    recorder = Recorder(arguments.pop("drafter"), 2, ArithmeticError("the drafter broke"), part)
    match = "the drafter failed, and the rest was decoded without it: the drafter broke"
    with pytest.raises(stree.GenerationError, match=match) as caught, caplog.at_level("WARNING", "stree"):
        stree.generate(lm(), PROMPTS, recorder, **arguments, max_new_tokens=NEW_TOKENS)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert caught.value.output.sequences == greedy_texts()
    assert caught.value.output.stats["finish_reasons"] == ["length"] * 4
    assert "goes on without it: ArithmeticError: the drafter broke" in caplog.text
    assert stree.generate(lm(), PROMPTS, **way(name), max_new_tokens=NEW_TOKENS).sequences == greedy_texts()


def test_the_kind_of_a_failure_is_named_where_its_message_is_a_key_alone() -> None:
    prompts = ({"prompt": PROMPTS[0]}[name] for name in ("prompt", "text"))
    with pytest.raises(stree.GenerationError, match="generation failed after 2 new tokens: KeyError: 'text'"):
        stree.generate(lm(), prompts, max_batch=1, max_length=64, max_new_tokens=2)


def test_one_text_of_a_batch_is_cancelled_and_the_others_end_as_they_would() -> None:
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "sampling": Sampling(0.8)}
    whole = stree.generate(lm(), PROMPTS, **way("self-chain"), **options).sequences
    asked: list[int] = []

    def cancelled(sequence: int) -> bool:
        asked.append(sequence)
        return sequence == 1 and asked.count(1) == 2

    for max_batch in (None, 2):
        asked.clear()
        out = stree.generate(lm(), PROMPTS, **way("self-chain"), cancelled=cancelled, max_batch=max_batch, **options)
        reasons = out.stats["finish_reasons"]
        assert reasons == ["length", "cancelled", "length", "length"] and asked.count(1) == 2
        assert out.sequences[1] == whole[1][: len(out.sequences[1])]
        assert len(PROMPTS[1]) < len(out.sequences[1]) < len(whole[1])
        assert [text for row, text in enumerate(out.sequences) if row != 1] == [whole[0], *whole[2:]]


def test_a_text_that_is_cancelled_while_its_next_step_runs_ends_with_what_was_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device, where a step is launched before the last one is heard of."""
    whole = stree.generate(lm(), PROMPTS, **way("self-chain"), max_new_tokens=NEW_TOKENS).sequences
    # Only a device hears late.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda *_: True)
    answers = iter([False, True])
    out = stree.generate(
        lm(), PROMPTS, **way("self-chain"), max_new_tokens=NEW_TOKENS, max_batch=2,
        cancelled=lambda sequence: sequence == 1 and next(answers),
    )  # fmt: skip
    assert out.stats["finish_reasons"] == ["length", "cancelled", "length", "length"]
    assert out.sequences[1] == whole[1][: len(out.sequences[1])] and len(out.sequences[1]) < len(whole[1])
    assert [text for row, text in enumerate(out.sequences) if row != 1] == [whole[0], *whole[2:]]
    row = out.stats["rows"][1]
    assert row["steps"] * row["tau"] == pytest.approx(len(out.new_tokens[1]) - 1), "the step that still ran is not its"


def test_memory_that_runs_out_is_said_with_the_sum_and_less_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = way("self-chain")
    verify = stree.TreeLM.verify

    def failing(self: Any, state: Any, tree: Any, first: int = 0) -> Any:
        if state.batch_size > 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return verify(self, state, tree, first)

    monkeypatch.setattr(stree.TreeLM, "verify", failing)
    with pytest.raises(
        stree.GenerationError, match=r"tried to allocate 2 GiB.* = 4 texts x .*lower max_batch"
    ) as error:
        stree.generate(lm(), PROMPTS, NoDrafter(), budget=arguments["budget"], max_new_tokens=NEW_TOKENS)
    assert error.value.output.stats["finish_reasons"] == ["error"] * 4
    out = stree.generate(lm(), PROMPTS, **arguments, max_new_tokens=NEW_TOKENS, max_batch=2)
    assert out.sequences == greedy_texts()


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_memory_that_runs_out_in_drafting_ends_the_text(method: str) -> None:
    class Full(SuffixDrafter):
        def start(self, *given: Any) -> Any:
            run = super().start(*given)
            work, calls = getattr(run, method), iter(range(9))

            def failing(*operands: Any) -> Any:
                if next(calls) == 2:
                    raise torch.OutOfMemoryError("tried to allocate 2 GiB")
                return work(*operands)

            setattr(run, method, failing)
            return run

    with pytest.raises(stree.GenerationError, match=r"tried to allocate 2 GiB.*lower max_batch") as caught:
        stree.generate(lm(), PROMPTS[:1], Full(), budget=4, max_new_tokens=NEW_TOKENS)
    assert caught.value.output.stats["finish_reasons"] == ["error"]


def test_ctrl_c_reports_what_was_generated_and_leaves_the_model_usable() -> None:
    arguments = way("self-chain")
    recorder = Recorder(arguments.pop("drafter"), 2, KeyboardInterrupt())
    with pytest.raises(stree.GenerationInterrupted, match="generation interrupted") as caught:
        stree.generate(lm(), PROMPTS[:1], recorder, **arguments, max_new_tokens=NEW_TOKENS)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.output.sequences == [greedy_texts()[0][: len(PROMPTS[0]) + 11]]
    assert caught.value.output.stats["finish_reasons"] == ["interrupted"]
    assert stree.generate(lm(), PROMPTS, **way("self-chain"), max_new_tokens=NEW_TOKENS).sequences == greedy_texts()


def test_a_drafter_that_fails_to_start_raises_its_own_error() -> None:
    class Failing(SuffixDrafter):
        def start(self, *_: Any) -> Any:
            raise ValueError("no store today")

    with pytest.raises(ValueError, match="^no store today$"):
        stree.generate(lm(), PROMPTS, Failing())


def test_what_ends_a_generation_can_be_pickled() -> None:
    out = stree.Generation([[1, 2]], {"steps": 1})
    for problem in (stree.GenerationError("it failed", out), stree.GenerationInterrupted(out)):
        copied = pickle.loads(pickle.dumps(problem))
        assert type(copied) is type(problem) and str(copied) == str(problem) and copied.output == out
    assert str(problem) == "generation interrupted"
