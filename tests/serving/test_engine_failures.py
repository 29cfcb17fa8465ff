"""The engine refuses what it cannot run, and what fails ends only what it must.

Run: python -m pytest tests/serving/test_engine_failures.py
"""

import copy
import os
import threading
import warnings
from typing import Any

import pytest
import torch
from helpers.captured import launched
from helpers.engine_requests import LIMITS, PROMPTS, WAYS, alone, submit
from helpers.tiny_models import patched, tiny_model

import stree
from stree.drafters import Draft, Drafter, DraftRun, NoDrafter, SuffixDrafter


def test_a_full_queue_refuses_and_a_closed_engine_does(engine: stree.Engine) -> None:
    engine.max_queue = 1
    handles = [submit(engine, 7, max_new_tokens=80) for _ in range(3)]
    with pytest.raises(stree.QueueFull, match="wait already"):
        for _ in range(3):
            submit(engine, 7)
    engine.close()
    assert {handle.finish_reason for handle in handles} <= {"cancelled", "length"}
    with pytest.raises(RuntimeError, match="closed"):
        submit(engine, 0)


def test_closing_with_grace_lets_requests_end() -> None:
    engine = stree.Engine(launched(), NoDrafter(), budget=1, max_batch=1, max_length=96)
    handles = [submit(engine, place) for place in range(3)]
    engine.close(grace=120)
    assert [handle.finish_reason for handle in handles] == ["length"] * 3


def test_bad_requests_are_refused_before_anything_runs(engine: stree.Engine) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "empty"), ([1, 10**6], {}, "outside the vocabulary"), ([1] * 95, {}, "exceeds max_length"),
        ("text", {}, "list of tokens"), ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"stop_token_ids": list(range(65))}, "at most 64"), ([1], {"logprobs": -1}, "logprobs"),
        ([1], {"stop_strings": "x"}, "tokenizer"), ([1], {"sampling": 0.8}, "sampling must be"),
        ([1], {"prompt_logprobs": 10**6}, "prompt_logprobs must be True or a number of alternatives up to"),
    ]  # fmt: skip
    for prompt, changed, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            engine.submit(prompt, **{"max_new_tokens": 5, **changed})
    assert engine.stats["requests"] == 0


def test_a_request_is_refused_while_the_target_cannot_run() -> None:
    lm = patched(tiny_model("mamba2"))
    with stree.Engine(lm, NoDrafter(), max_batch=1, max_length=32) as engine:
        lm.model.train()
        with pytest.raises(RuntimeError, match="the model is in training mode"):
            engine.submit([1, 2], max_new_tokens=2)
        assert engine.stats["requests"] == 0
        lm.model.eval()
        assert len(engine.submit([1, 2], max_new_tokens=2, ignore_eos=True).result(60).sequences[0]) == 4


class _Failing(Drafter):
    """Raises in the second step."""

    uses_growth = False

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> DraftRun:
        run = NoDrafter().start(vocab_size, prompts, rng)
        propose, calls = run.propose, []

        def failing(pending: torch.Tensor, growth: Any, budget: int) -> Draft:
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("no more drafts")
            return propose(pending, growth, budget)

        run.propose = failing  # type: ignore[method-assign]
        return run


def test_a_drafter_that_fails_ends_no_request() -> None:
    lm = launched()
    with stree.Engine(lm, _Failing(), budget=4, max_batch=2, max_length=96) as engine:
        for place in (0, 3, 7):
            handle = submit(engine, place)
            assert handle.result(60).sequences[0] == alone(lm, WAYS["none"], place)
            problem = "no more drafts" if LIMITS[place] > 1 else None
            assert handle.finish_reason == "length" and handle.stats["drafting_problem"] == problem
        assert engine.stats["drafting_failures"] == 2


def test_a_drafter_of_one_text_is_named() -> None:
    class Once(Drafter):
        def start(self, vocab_size: int, prompts: Any, rng: Any) -> DraftRun:
            return DraftRun()

    with (
        stree.Engine(launched(), Once(), max_batch=2, max_length=96) as engine,
        pytest.raises(stree.GenerationError, match=r"Once cannot take up a prompt in mid-run \(can_begin is False\)"),
    ):
        submit(engine, 0).result(60)


class _Unselectable(SuffixDrafter):
    """Its run fails where a second text joins the batch."""

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> Any:
        run: Any = super().start(vocab_size, prompts, rng)
        run.select = lambda *_: 1 / 0
        return run


def test_a_run_that_cannot_be_selected_from_is_done_without() -> None:
    lm = patched(tiny_model("mamba2"))
    with stree.Engine(lm, _Unselectable(), budget=4, max_batch=2, max_length=96) as engine:
        handles = [submit(engine, place) for place in (0, 7)]
        assert [handle.result(60).sequences[0] for handle in handles] == [
            alone(lm, WAYS["none"], place) for place in (0, 7)
        ]
        assert {handle.stats["drafting_problem"] for handle in handles} == {"division by zero"}


def test_a_flag_without_its_method_is_refused() -> None:
    class Claiming(Drafter):
        def start(self, vocab_size: int, prompts: Any, rng: Any) -> DraftRun:
            run = DraftRun()
            run.can_select = True
            return run

    with pytest.raises(TypeError, match="DraftRun must implement select, as its can_select is True"):
        stree.generate(launched(), [[1, 2]], Claiming(), budget=4, max_new_tokens=4)


def test_a_target_that_fails_ends_the_running_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = launched()
    with stree.Engine(lm, NoDrafter(), budget=1, max_batch=2, max_length=96) as engine:
        healthy = lm.verify
        monkeypatch.setattr(lm, "verify", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("a broken device")))
        handle = submit(engine, 0)
        with pytest.raises(stree.GenerationError, match="broken device") as failure:
            handle.result(60)
        assert failure.value.output.sequences[0][:-1] == PROMPTS[0] and handle.finish_reason == "error"
        monkeypatch.setattr(lm, "verify", healthy)
        assert submit(engine, 0).result(60).sequences[0] == alone(lm, WAYS["none"], 0)


def test_a_prompt_that_the_target_answers_with_nan_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = launched()
    with stree.Engine(lm, NoDrafter(), budget=1, max_batch=2, max_length=96) as engine:
        running, prefill = submit(engine, 7), lm.prefill
        next(iter(running))
        monkeypatch.setattr(lm, "prefill", lambda *args, **options: prefill(*args, **options) * torch.nan)
        with pytest.raises(stree.GenerationError, match="the target's logits are NaN after the prompt"):
            submit(engine, 0).result(60)
        monkeypatch.undo()
        assert running.result(60).sequences[0] == alone(lm, WAYS["none"], 7)
        assert submit(engine, 0).result(60).sequences[0] == alone(lm, WAYS["none"], 0)


@pytest.mark.parametrize("way", ["suffix", pytest.param("fused", marks=pytest.mark.slow)])
def test_logits_of_nan_in_mid_text_end_their_request_alone(way: str) -> None:
    model, token = copy.deepcopy(tiny_model("bamba")), 20
    model.get_input_embeddings().weight.data[token] = torch.nan
    lm, (drafter, settings) = stree.TreeLM(model), WAYS[way]
    expected = {place: alone(launched(), WAYS[way], place) for place in (2, 7)}
    assert not any(token in text for text in expected.values())
    with stree.Engine(lm, drafter, max_batch=3, max_length=96, cache_bytes=1 << 20, **settings) as engine:
        for _ in range(2):  # the second time in rows that were used
            running = {place: submit(engine, place) for place in expected}
            broken = submit(engine, 4, allowed_token_ids=[token])
            with pytest.raises(stree.GenerationError, match="the target's logits are NaN") as failure:
                broken.result(60)
            assert failure.value.output.sequences[0] == [*PROMPTS[4], token]
            assert {place: handle.result(60).sequences[0] for place, handle in running.items()} == expected


def test_threads_read_while_the_engine_runs(engine: stree.Engine) -> None:
    handle, read = submit(engine, 7), list[list[int]]()
    threads = [threading.Thread(target=lambda: read.append(list(handle))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert read == [handle.tokens] * 3 and len(read[0]) == LIMITS[7]


class _Exiting(SuffixDrafter):
    """Ends the thread that starts it."""

    def start(self, *arguments: Any, **options: Any) -> Any:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_ends_where_the_engine_s_thread_ends_while_it_begins() -> None:
    engine = stree.Engine(launched(), _Exiting(), budget=4, max_batch=2, max_length=96)
    with engine, pytest.raises(RuntimeError, match="the engine's thread has ended by an error"):
        submit(engine, 0).result(20)


class _SlowToStart(SuffixDrafter):
    """Starts once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_start = threading.Event(), threading.Event()

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.is_asked.set()
        assert self.may_start.wait(20)
        return super().start(*arguments, **options)


def test_a_forked_process_cannot_use_its_parent_s_engine(engine: stree.Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        try:
            engine.submit([1, 2], max_new_tokens=2)
        except RuntimeError as error:
            os._exit(0 if "forked from" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(submit(engine, 0).result(60).sequences) == 1


def test_without_a_queue_no_request_waits_while_another_one_begins() -> None:
    drafter = _SlowToStart()
    with stree.Engine(launched(), drafter, budget=4, max_batch=2, max_length=96, max_queue=0) as engine:
        handles = [submit(engine, 0)]
        assert drafter.is_asked.wait(60)
        handles.append(submit(engine, 1))
        with pytest.raises(stree.QueueFull, match="2 requests run or wait already, of at most 2"):
            submit(engine, 2)
        drafter.may_start.set()
        assert [len(handle.result(60).sequences[0]) for handle in handles] == [16, 14]
        submit(engine, 2).result(60)
